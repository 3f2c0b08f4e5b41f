"""Numbers against a reference: a recorded fixture, or transformers at work beside us."""
