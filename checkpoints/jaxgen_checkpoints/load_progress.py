"""A progress bar for loading, on stderr: bytes so far, GB/s, time left."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def loading_bar(total_bytes: int, *, show: bool = True) -> Generator[Callable[[int], object]]:
    """Yield what `load` wants as `progress`. Nothing is drawn unless stderr is a terminal."""
    with tqdm(
        total=total_bytes,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        unit_divisor=1000,
        file=sys.stderr,
        disable=not (show and sys.stderr.isatty()),
    ) as bar:
        yield bar.update
