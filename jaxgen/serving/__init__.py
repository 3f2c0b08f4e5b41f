"""Serving: one thread owns the engine, asyncio talks to it, HTTP talks to that."""
