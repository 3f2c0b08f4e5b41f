"""What a step takes if its parts run one after another, each as fast as bytes or FLOPs let it."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxgen.engine.cost import step_parts
from jaxgen.engine.model import Model
from jaxgen.plan.chips import Chip
from jaxgen.plan.program import SCORED, Program


@dataclass(frozen=True, slots=True)
class Estimate:
    """One kind of step, in milliseconds.

    tokens: in a step, of one replica. context: keys that each row sees. memory_ms, matrix_ms: all
    bytes at the chip's bandwidth, all FLOPs at its rate. launch_ms: of the kernels, where that was
    measured. tokens_per_second: of one replica.
    """

    name: str
    tokens: int
    rows: int
    context: int
    bytes_read: int
    flops: int
    memory_ms: float
    matrix_ms: float
    collective_ms: float
    launch_ms: float
    step_ms: float
    bound: str
    tokens_per_second: float


def estimates(
    model: Model, programs: Iterable[Program], chip: Chip | None, *, rows: int, context: int
) -> tuple[Estimate, ...]:
    """Of a decode step of so many rows at so long a context, and of a prefill of one row. None of
    the step that scores, and none at all for a CPU, whose speed nobody states.
    """
    return tuple(
        estimate(
            model,
            program,
            chip,
            rows=rows if program.bucket.decode else 1,
            context=context if program.bucket.decode else program.bucket.tokens,
        )
        for program in programs
        if chip is not None and program.name != SCORED
    )


def estimate(model: Model, program: Program, chip: Chip, *, rows: int, context: int) -> Estimate:
    """For each part the larger of reading and multiplying, then collectives: nothing overlaps.

    rows: that the step is full of; decode steps have a token each, others all the bucket's tokens.
    """
    bucket = program.bucket
    tokens = rows if bucket.decode else bucket.tokens
    parts = step_parts(model, tokens=tokens, rows=rows, context=context)
    read, flops = sum(part.bytes_read for part in parts), sum(part.flops for part in parts)
    times = {
        "memory": read / chip.ceilings.bandwidth,
        "matrix": flops / chip.ceilings.matrix_rate,
        "collectives": _collective_seconds(program, chip),
        "launches": program.kernels * chip.launch,
    }
    work = sum(part.seconds(chip.ceilings) for part in parts) / chip.attained
    step = work + times["collectives"] + times["launches"]
    return Estimate(
        name=program.name,
        tokens=tokens,
        rows=rows,
        context=context,
        bytes_read=read,
        flops=flops,
        memory_ms=times["memory"] * 1e3,
        matrix_ms=times["matrix"] * 1e3,
        collective_ms=times["collectives"] * 1e3,
        launch_ms=times["launches"] * 1e3,
        step_ms=step * 1e3,
        bound=max(times, key=lambda name: times[name]),
        tokens_per_second=tokens / step,
    )


def _collective_seconds(program: Program, chip: Chip) -> float:
    """An all-reduce moves its bytes out of a device twice, the others once."""
    moved = sum(c.bytes * (2 if c.kind == "all-reduce" else 1) for c in program.collectives)
    return moved / chip.link + sum(c.count for c in program.collectives) * chip.hop
