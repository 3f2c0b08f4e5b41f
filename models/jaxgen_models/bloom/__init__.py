"""BLOOM: ALiBi instead of positions, a norm behind the embedding."""
