"""Mistral: Llama's layout with a sliding window over the past."""
