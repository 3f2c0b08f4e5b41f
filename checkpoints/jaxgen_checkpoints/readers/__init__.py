"""One module per file format, each a `TensorSource`; formats know nothing of models or meshes."""
