"""Gemma 2: four norms a block, soft caps, every other layer through a window."""
