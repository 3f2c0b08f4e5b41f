"""Qwen3 (dense): norms over each query and key head, an explicit head width."""
