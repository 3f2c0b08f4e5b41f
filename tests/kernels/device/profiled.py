"""Time of each kernel by the profiler: a clock's figure has the gaps between kernels in it too."""

import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from jaxgen.bench.kernels.timing import median_call_seconds

RUNS = 4


def kernel_times(run: Callable[[], Any], calls: int = 1) -> dict[str, float]:
    """Microseconds a call of each kernel, by name. run: begins a chain of so many calls, and gives
    arrays that are ready when it has ended.
    """
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run() for _ in range(RUNS)])
        (path,) = Path(folder).glob("**/*.xplane.pb")
        profile = ProfileData.from_file(str(path))
    sums: dict[str, float] = defaultdict(float)
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for event in (e for line in plane.lines if "Stream" in line.name for e in line.events):
            sums[event.name] += event.duration_ns / 1e3 / calls / RUNS
    return dict(sums)


def timed(run: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Microseconds a call: of all its kernels, and by the clock when many are queued."""
    clock = median_call_seconds(run, calls, queued=10, batches=5) * 1e6
    return sum(kernel_times(run, calls).values()), clock


def ours(times: dict[str, float]) -> float:
    """What Pallas's kernels take of it."""
    return sum(us for name, us in times.items() if "mosaic_gpu" in name)
