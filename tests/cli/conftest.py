"""Commands run in this process; equal steps are compiled once for all of these tests."""

from collections.abc import Callable, Generator
from typing import NamedTuple

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxgen.cli import main


class Result(NamedTuple):
    """How a command ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    def lines(self, start: str) -> list[str]:
        """The lines of stderr that begin with `start`."""
        return [line for line in self.err.splitlines() if line.startswith(start)]


@pytest.fixture
def run(capsys) -> Callable[..., Result]:
    """`run("generate", folder, ...)` is what the command line would do."""

    def call(*words: object) -> Result:
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session", autouse=True)
def shared_compiles(tmp_path_factory) -> Generator[None]:
    """A compile cache that lives as long as the session, instead of the user's own."""
    changed = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in changed}
    for name, value in changed.items():
        jax.config.update(name, value)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()
