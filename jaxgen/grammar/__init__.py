"""Which tokens may come next: masks over the vocabulary, computed on the host for some requests."""
