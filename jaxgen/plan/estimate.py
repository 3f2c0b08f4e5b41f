"""What a step would take if nothing but bytes, FLOPs and collectives counted."""

from dataclasses import dataclass

from jaxgen.engine.cost import step_cost
from jaxgen.engine.model import Model
from jaxgen.plan.chips import Chip
from jaxgen.plan.program import Program


@dataclass(frozen=True, slots=True)
class Estimate:
    """One kind of step at its roofline, in milliseconds.

    tokens: in a step, of one replica. context: keys that each row sees. tokens_per_second: of one
    replica.
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
    step_ms: float
    bound: str
    tokens_per_second: float


def estimate(model: Model, program: Program, chip: Chip, *, rows: int, context: int) -> Estimate:
    """The larger of reading and multiplying, and the collectives after it: nothing overlaps them.

    rows: that the step is full of; decode steps have a token each, others all the bucket's tokens.
    """
    bucket = program.bucket
    tokens = rows if bucket.decode else bucket.tokens
    cost = step_cost(model, tokens=tokens, rows=rows, context=context)
    memory = cost.bytes_read / chip.ceilings.bandwidth
    matrix = cost.flops / chip.ceilings.matrix_rate
    collective = _collective_seconds(program, chip)
    step = max(memory, matrix) + collective
    parts = {"memory": memory, "matrix": matrix, "collectives": collective}
    return Estimate(
        name=program.name,
        tokens=tokens,
        rows=rows,
        context=context,
        bytes_read=cost.bytes_read,
        flops=cost.flops,
        memory_ms=memory * 1e3,
        matrix_ms=matrix * 1e3,
        collective_ms=collective * 1e3,
        step_ms=step * 1e3,
        bound=max(parts, key=lambda part: parts[part]),
        tokens_per_second=tokens / step,
    )


def _collective_seconds(program: Program, chip: Chip) -> float:
    """An all-reduce moves its bytes out of a device twice, the others once."""
    moved = sum(c.bytes * (2 if c.kind == "all-reduce" else 1) for c in program.collectives)
    return moved / chip.link + sum(c.count for c in program.collectives) * chip.hop
