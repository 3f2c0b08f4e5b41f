"""Granite: Llama's layout with four multipliers."""
