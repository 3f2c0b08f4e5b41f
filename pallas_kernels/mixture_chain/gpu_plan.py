"""What the mixture chain's kernel is to do, as static facts, and how shared memory is spent.

Most products are as layer_chain's: a row of a weight in eight parts. The experts' last product has
its eight parts already: 16 rows of it from each of a token's experts fill two tiles of the matrix
unit, and the eight columns are what the experts have hidden.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.layer_chain.gpu_plan import (
    PARTS,
    SHARED_MEMORY,
    TILE,
    UNIT,
    Before,
    Plan,
    Problem,
    Stage,
)
from pallas_kernels.mixture_chain.checks import HEAD, state_size

# Places in the state: how often blocks have met, and the rounds that are over; then words.
MEETINGS, ROUND = 0, 1

_SMALL = 12 * 1024  # shared memory for sums, lists, and sums over threads
_BARRIER, _BARRIERS = 8, 16  # bytes of one, and how many at most are for no slot and no chunk


class Phase(StrEnum):
    """What lies between two barriers of the whole grid."""

    OUT = "out"
    ROUTER = "router"
    UP = "up"
    DOWN = "down"
    NEXT = "next"


PHASES = tuple(Phase)


@dataclass(frozen=True, slots=True)
class Facts:
    """The sizes of a layer and what its kernel is told. shared: width of the shared expert; before:
    what gathers the first product's input and sends it, where that is no input of the kernel.
    """

    inner: int
    model: int
    ffn: int
    shared: int
    fused: int | None
    choice: ChoiceProblem
    dtype: Any
    eps: float
    activation: str
    interpret: Any = None
    before: Before | None = None

    @property
    def skipped(self) -> int:
        """Slots of the ring that weights leave to others at first: uses are counted from there."""
        return 0 if self.before is None else self.before.slots

    @property
    def problem(self) -> Problem:
        """What layer_chain's parts of a kernel are told."""
        return Problem(1, (), self.dtype, self.eps, self.activation, self.interpret)

    @property
    def visited(self) -> int:
        """Experts that the token visits, the parts of the shared one included."""
        return self.choice.top_k + self.shared // self.ffn

    def words(self, name: str) -> int:
        """Where in the state lie the words of "middle", "stream", "scores" or "attended"."""
        if name == "attended":
            return state_size(self.model, self.choice.experts)
        return HEAD + self.model * ("middle", "stream", "scores").index(name)

    def stage(self, name: str) -> Stage:
        """The product of this name."""
        norm, model, ffn = "mlp_norm", self.model, self.ffn
        top_k = self.choice.top_k
        stages = {
            "out": Stage("attended", "out", "middle", self.inner, model, addend="residual"),
            "shared": Stage("middle", "shared_gate_up", "hidden", model, self.shared, gated=True),
            "up": Stage("middle", "gate_up", "hidden", model, top_k * ffn, gated=True, norm=norm),
            # Of all experts together; `width` of it is that of one.
            "down": Stage("hidden", "down", "stream", PARTS * ffn, model, addend="middle"),
            "next": Stage("stream", "following", "fused", model, self.fused or 0, norm="next_norm"),
        }
        return stages[name]


def make_plan(facts: Facts, blocks: int, *, least: int = 0) -> Plan:
    """Shared memory for the tokens of the widest product, at least so many bytes, and all else for
    weights: a few on their way, and those that are there before their tokens are.
    """
    widths = (facts.inner // PARTS, facts.model // PARTS, facts.ffn)
    columns = next(each for each in (128, 64) if all(width % each == 0 for width in widths))
    chunks = max(widths) // columns
    tokens = max(least, chunks * PARTS * columns * 2)
    room = SHARED_MEMORY - _SMALL - tokens - _BARRIER * (chunks + _BARRIERS)
    slots = room // (2 * TILE * columns * 2 + 3 * _BARRIER)
    return Plan(blocks, columns, slots, chunks)


def units_of_expert(facts: Facts) -> int:
    """Units of one expert's hidden layer."""
    return facts.ffn // UNIT
