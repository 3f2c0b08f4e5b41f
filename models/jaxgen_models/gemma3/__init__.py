"""Gemma 3 (text): head norms, most layers through a window, with a rotation of their own."""
