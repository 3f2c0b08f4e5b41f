"""Commands run in this process."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

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
