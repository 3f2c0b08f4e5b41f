"""From checkpoint bytes to a described, sharded pytree: reading, mapping, loading, storing."""
