"""Compiled steps are kept on disk, so that the next start with the same model and shapes is fast.

JAX's own persistent cache keeps what is compiled when it is first met; its key holds the lowered
program, the flags, the devices and the compiler's version. A warm-up's programs are kept beside
it, where they are found without lowering them (see `jaxgen.engine.program_store`).
"""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

_SECONDS = 0.5  # a step that compiles faster than this is not worth a file

_lock = threading.Lock()
_leaving_out = 0  # how many are in `jax_cache_left_out`
_enabled = True  # what is restored when the last one leaves it


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


def program_folder() -> Path | None:
    """Where a warm-up's programs are kept: in the folder of JAX's own cache, if it has one here."""
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or "://" in folder:
        return None
    return Path(folder) / "programs"


@contextmanager
def jax_cache_left_out() -> Generator[None]:
    """Within it no thread of this process reads or writes JAX's own cache.

    For what it does not serve: XLA's CPU programs that came out of it lose their functions when
    they are written again elsewhere, and programs for devices that are not there cannot be read.
    """
    _leave_out(1)
    try:
        yield
    finally:
        _leave_out(-1)


def _leave_out(more: int) -> None:
    global _leaving_out, _enabled
    with _lock:
        if not _leaving_out:
            _enabled = jax.config.jax_enable_compilation_cache
        changes = 0 in (_leaving_out, _leaving_out + more)
        _leaving_out += more
        if changes:
            jax.config.update("jax_enable_compilation_cache", _enabled and not _leaving_out)
            reset_cache()  # JAX asks for the setting once
