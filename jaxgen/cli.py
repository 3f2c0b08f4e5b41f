"""The `jaxgen` command: runs a subcommand and turns its end into an exit code and one line.

Nothing here imports JAX: `--help` and wrong options answer at once.
"""

import logging
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TextIO

from jaxgen.commands.interrupts import INTERRUPTED, leaving_at_once
from jaxgen.commands.parser import build_parser
from jaxgen.commands.terminal import one_line
from jaxgen.schedule.verdict import SchedulingError
from jaxgen_checkpoints.errors import CheckpointWarning, RefusedInput

DONE, MISMATCH, REFUSED = 0, 1, 2

MEMORY_FRACTION = "0.95"
"""Of a GPU's memory, for XLA, which takes 75% if nobody says more. What is left is for the driver,
the programs, and libraries with memory of their own.
"""
_MEMORY_SETTINGS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 (done, verified), 1 (mismatch), 2 (refused) or 130 (interrupted).

    Options that argparse refuses end in SystemExit with code 2. What is no user's doing keeps its
    traceback.
    """
    args = build_parser().parse_args(argv)
    if not any(name in os.environ for name in _MEMORY_SETTINGS):
        os.environ[_MEMORY_SETTINGS[0]] = MEMORY_FRACTION  # read when JAX meets the device
    with leaving_at_once():
        command = import_module(f"jaxgen.commands.{args.command}")
    try:
        with _log_to_stderr(), _warnings_as_lines():
            return command.run(args)
    except (RefusedInput, SchedulingError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left (`| head`); the interpreter's own flush must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except OSError as error:
        if error.filename is None:
            raise
        return _refuse(f"{error.filename}: {error.strerror}")


def _refuse(message: str) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return REFUSED


@contextmanager
def _log_to_stderr() -> Generator[None]:
    """The package's own log, from INFO, as plain lines."""
    logger, handler = logging.getLogger("jaxgen"), logging.StreamHandler()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


@contextmanager
def _warnings_as_lines() -> Generator[None]:
    """Each warning is one line `warning: ...` on stderr, and is told once."""
    told: set[str] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = one_line(str(message))
        if text not in told:
            told.add(text)
            print(f"warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=CheckpointWarning)
        warnings.showwarning = show  # ty: ignore[invalid-assignment]
        yield
