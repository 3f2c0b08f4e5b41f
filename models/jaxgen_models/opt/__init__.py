"""OPT: learned positions from the third row on, norms before or behind each part."""
