"""Phi-1, 1.5 and 2: attention and MLP in parallel, partly rotated heads, biases everywhere."""
