"""Device operations of an inference step, each with a plain JAX meaning and fast kernels."""
