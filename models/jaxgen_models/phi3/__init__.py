"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, long-context rotation."""
