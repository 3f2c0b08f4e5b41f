"""A plan as a picture: what fills a device's memory, and what a step's time is made of."""

from collections.abc import Sequence
from typing import Any

from jaxgen.plan import Deployment
from jaxgen_checkpoints.errors import RefusedInput


def draw(plans: Sequence[Deployment], path: str) -> None:
    """Writes the picture; RefusedInput without matplotlib or for a format that it does not know."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RefusedInput("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 1.6 + 0.7 * len(plans)), layout="constrained")
    memory, time = figure.subplots(1, 2)
    _memory(memory, plans)
    _time(time, plans)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise RefusedInput(f"--plot {path}: {error}") from error


def _memory(axes: Any, plans: Sequence[Deployment]) -> None:  # noqa: ANN401
    names = [plan.topology for plan in plans]
    left = [0.0] * len(plans)
    for part in ("weights", "temporary", "kv"):
        values = [getattr(plan.memory, part) / 2**30 for plan in plans]
        axes.barh(names, values, left=left, label={"temporary": "step", "kv": "KV"}.get(part, part))
        left = [a + b for a, b in zip(left, values, strict=True)]
    for row, plan in enumerate(plans):
        if plan.memory.limit is not None:
            axes.vlines(plan.memory.limit / 2**30, row - 0.45, row + 0.45, colors="black")
    axes.set(title="memory of one device (line: its limit)", xlabel="GiB")
    axes.invert_yaxis()
    axes.legend(loc="best")


def _time(axes: Any, plans: Sequence[Deployment]) -> None:  # noqa: ANN401
    timed = [(plan, estimate) for plan in plans for estimate in plan.estimates]
    names = [f"{plan.topology}\n{e.name}, {e.tokens} tokens" for plan, e in timed]
    roofline = [e.step_ms - e.collective_ms for _, e in timed]
    axes.barh(names, roofline, label="roofline")
    axes.barh(names, [e.collective_ms for _, e in timed], left=roofline, label="collectives")
    for row, (_, e) in enumerate(timed):
        axes.text(e.step_ms, row, f" {e.bound}", va="center")
    axes.set(title="a step", xlabel="ms")
    axes.invert_yaxis()
    axes.legend(loc="best")
