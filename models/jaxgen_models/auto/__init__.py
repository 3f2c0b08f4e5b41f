"""Strangers whose tensors and config are Llama-like, mapped by structure."""
