"""Qwen (the first): a base that grows with the prompt, queries that grow with the position."""
