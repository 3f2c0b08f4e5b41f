"""Llama (1 to 3) and the many checkpoints published under its architecture."""
