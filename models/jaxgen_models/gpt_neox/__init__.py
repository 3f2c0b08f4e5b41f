"""GPT-NeoX and Pythia: partly rotated heads, attention and MLP in parallel or in sequence."""
