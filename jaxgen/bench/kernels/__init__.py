"""`jaxgen bench kernels`: each operation at the shapes that matter, checked, then timed."""
