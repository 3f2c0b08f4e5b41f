"""Ctrl-C between two steps rather than within one: the engine is whole when an answer stops."""

import signal
import threading
from types import FrameType
from typing import Self


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
