"""A plan as a picture: what fills a device's memory, where steps lie under each device's roofline,
and what their time is made of.
"""

from collections.abc import Sequence
from typing import Any

from jaxgen.plan import Deployment
from jaxgen.plan.chips import CHIPS
from jaxgen_checkpoints.errors import RefusedInput


def draw(plans: Sequence[Deployment], path: str) -> None:
    """Writes the picture; RefusedInput without matplotlib or for a format that it does not know."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RefusedInput("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(16, 3.2 + 0.7 * len(plans)), layout="constrained")
    memory, roofline, time = figure.subplots(1, 3)
    _memory(memory, plans)
    _roofline(roofline, plans)
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


def _roofline(axes: Any, plans: Sequence[Deployment]) -> None:  # noqa: ANN401
    """A line a device: its bandwidth, then its matrix rate. A mark a step: what it would reach."""
    for number, plan in enumerate(plans):
        if not plan.estimates:
            continue
        chip, color = CHIPS[plan.topology.partition(":")[0]], f"C{number}"
        ridge = chip.ceilings.matrix_rate / chip.ceilings.bandwidth
        ends = [ridge / 1000, ridge, ridge * 100]
        reached = [min(x, ridge) * chip.ceilings.bandwidth / 1e12 for x in ends]
        axes.plot(ends, reached, color=color, label=plan.topology)
        for estimate, marker in zip(plan.estimates, "os", strict=False):
            at = estimate.flops / estimate.bytes_read
            axes.plot([at], [estimate.flops / estimate.step_ms / 1e9], marker, color=color)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s of a device")
    axes.set(title="under the roofline (dot: decode, square: prefill)")
    if axes.lines:
        axes.legend(loc="best")


def _time(axes: Any, plans: Sequence[Deployment]) -> None:  # noqa: ANN401
    timed = [(plan, estimate) for plan in plans for estimate in plan.estimates]
    names = [f"{plan.topology}\n{e.name}, {e.tokens} tokens" for plan, e in timed]
    roofline = [e.step_ms - e.collective_ms for _, e in timed]
    axes.barh(names, roofline, label="reading or multiplying")
    axes.barh(names, [e.collective_ms for _, e in timed], left=roofline, label="collectives")
    for row, (_, e) in enumerate(timed):
        axes.text(e.step_ms, row, f" {e.bound}", va="center")
    axes.set(title="a step, and what bounds it", xlabel="ms")
    axes.margins(x=0.2)
    axes.invert_yaxis()
    if timed:
        axes.legend(loc="best")
