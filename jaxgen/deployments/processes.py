"""Processes that outlive their maker: started in sessions of their own, known by their number."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_STOP_SECONDS = 60.0


def start(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Runs `python -m jaxgen ARGUMENTS`, which writes to the file `log`; its process number."""
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "jaxgen", *arguments],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def alive(pid: int) -> bool:
    """Whether the process runs, whoever started it."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return False
    except ChildProcessError:
        pass  # somebody else's child
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def stop(pid: int) -> None:
    """Asks the process to end and waits; TimeoutError if it does not."""
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + _STOP_SECONDS
    while alive(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not end {_STOP_SECONDS:.0f} s after SIGTERM")
        time.sleep(0.05)
