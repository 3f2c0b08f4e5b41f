"""Ctrl-C between two steps rather than within one: the engine is whole when an answer stops."""

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Self

INTERRUPTED = 130
"""The exit code, as shells have it for SIGINT."""


class Interrupts:
    """While the `with` block runs, the first Ctrl-C sets `stopped`, the second interrupts at once.

    Outside the main thread, where Python has no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._before = None
        self._able = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        """Takes over SIGINT."""
        if self._able:
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *exc: object) -> None:
        """Gives SIGINT back."""
        if self._able:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True


@contextmanager
def leaving_at_once() -> Generator[None]:
    """Within it Ctrl-C ends the process, with the line and the code of any interrupted command.

    For imports: an exception in the midst of one becomes whatever the library makes of it. Where
    Ctrl-C is somebody else's (ignored, as under nohup, or handled), it stays theirs.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(INTERRUPTED)
