"""Measurements by vLLM's flags and keys, each beside the roofline measured in the same run."""
