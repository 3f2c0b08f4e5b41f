"""Several server processes behind one port: each prompt goes to the one with the fewest."""
