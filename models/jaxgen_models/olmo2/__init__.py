"""OLMo 2: norms behind attention and MLP, queries and keys normalised over all heads at once."""
