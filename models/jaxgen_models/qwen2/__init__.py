"""Qwen2 and Qwen2.5 (dense): biases on q, k and v, an optional window on the upper layers."""
