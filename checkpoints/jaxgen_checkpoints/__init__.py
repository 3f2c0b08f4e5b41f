"""Checkpoints in, described and sharded parameter trees out."""
