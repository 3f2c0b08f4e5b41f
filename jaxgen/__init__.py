"""jaxgen: an LLM inference engine in JAX; the public face of engine, pipelines and options."""
