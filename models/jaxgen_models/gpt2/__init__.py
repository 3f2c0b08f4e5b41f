"""GPT-2: learned positions, LayerNorms, weights stored [in, out]."""
