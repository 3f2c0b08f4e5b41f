"""Compiled steps are kept on disk, so that the next start with the same model and shapes is fast.

JAX's own persistent cache does the work; its key holds the program, the flags, the devices and the
compiler's version.
"""

import os
from pathlib import Path

import jax

_SECONDS = 0.5  # a step that compiles faster than this is not worth a file


def default_cache_folder() -> Path:
    """$XDG_CACHE_HOME/jaxgen/compiled, or the same under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxgen" / "compiled"


def use_compile_cache(folder: Path | None = None) -> None:
    """Turns the cache on for this process, unless the user has configured JAX's own already."""
    if jax.config.jax_compilation_cache_dir is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder or default_cache_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SECONDS)
