"""Qwen3-MoE: norms over each query and key head, many small experts, none shared."""
