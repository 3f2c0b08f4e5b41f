"""Command R: attention and MLP in parallel, norms without bias, neighbouring channels rotate."""
