"""Qwen1.5-MoE and Qwen2-MoE: QKV biases, experts, and one gated expert for all tokens."""
