"""The engine: one jitted step, the host state that feeds it, and the loop that keeps it busy."""
