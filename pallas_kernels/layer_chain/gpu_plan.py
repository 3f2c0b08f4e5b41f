"""What the chain's kernel is to do, as static facts: its stages, and how shared memory is spent.

Every matrix [out, in] is looked at as [8 * out, in / 8], the same bytes: eight rows of the weight
fill the 64 rows of a matrix unit's tile, each row in eight parts. The tokens [rows, in] are looked
at as [8 * rows, in / 8] likewise. A product of the two holds in its blocks' diagonals the parts'
sums; so even one token fills the eight columns that the matrix unit computes at least, and any
multiple of 16 rows of the weight is a unit of work.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

PARTS = 8  # of a row: the least number of columns of the matrix unit
TILE = 64  # rows of the matrix unit
PASS = 16  # rows of the weight that are multiplied at a time, in two tiles
UNIT = 16  # columns of the output that are finished at a time
SHARED_MEMORY = 227 * 1024
SMALL = 10 * 1024 + 512  # shared memory for sums and barriers

ON_THEIR_WAY = 2
"""Steps of a block's weights on their way at once, 32 KB each, however many slots are free.

What blocks tell each other waits in the memory system behind all that has been asked for: 6 us for
whole rings of 196 KB. Memory itself needs 26 KB a block (4.2 TB/s for 0.8 us). A layer on an H200
with 2, with 3 and with the whole ring: Llama-3.1-8B 111.0, 113.4, 113.5 us, Qwen3-30B-A3B 41.7,
43.7, 43.4.
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """One product. gated: gate and up, the result is activation(gate) * up.

    inner, outer: columns of its input and output. norm: its input is normalised first.
    addend: what is added to the result: "residual" (per row), "bias" (per column) or nothing.
    """

    source: str
    weight: str
    result: str
    inner: int
    outer: int
    gated: bool = False
    norm: str | None = None
    addend: str | None = None
    bias: bool = False

    @property
    def passes(self) -> int:
        """Passes over the input for one unit of output."""
        return 2 if self.gated else 1

    @property
    def units(self) -> int:
        """Units of the whole output."""
        return self.outer // UNIT

    @property
    def width(self) -> int:
        """Columns of the folded input."""
        return self.inner // PARTS


@dataclass(frozen=True, slots=True)
class Plan:
    """blocks of threads; columns of one step; slots of weights and chunks of tokens held.

    chunks: at least two, as one is loaded while the other is multiplied.
    """

    blocks: int
    columns: int
    slots: int
    chunks: int


@runtime_checkable
class Before(Protocol):
    """What a launch does before its products, while their weights begin to stream.

    slots: of the weights' ring, the first ones, which are its own until it arrives at the barrier
    `opened`. It is done when all blocks of threads have met after it.
    """

    @property
    def slots(self) -> int:
        """As above."""
        ...

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Its shared memory and barriers by name, `opened` among them."""
        ...

    def run(self, problem: "Problem", plan: Plan, refs: Any) -> None:
        """What the computing warpgroup of each block does."""
        ...


@dataclass(frozen=True, slots=True)
class Problem:
    """The stages of one launch and what all of them share; before: what else it does, first."""

    rows: int
    stages: tuple[Stage, ...]
    dtype: Any
    eps: float
    activation: str
    interpret: Any = None
    before: Before | None = None


def make_plan(
    rows: int,
    stages: tuple[Stage, ...],
    blocks: int,
    columns: int | None = None,
    slots: int | None = None,
    *,
    reserved: int = 0,
) -> Plan:
    """Shared memory for the tokens that a stage needs, and all but what is reserved for weights in
    flight.
    """
    widths = [stage.width for stage in stages]
    if columns is None:
        columns = next(each for each in (128, 64) if all(width % each == 0 for width in widths))
    chunk, slot = PARTS * rows * columns * 2, 2 * TILE * columns * 2
    normed = max(stage.width // columns for stage in stages if stage.norm)  # these must be whole
    chunks = max(2, normed)
    if slots is None:
        slots = (SHARED_MEMORY - SMALL - reserved - chunks * chunk) // slot
    return Plan(blocks=blocks, columns=columns, slots=slots, chunks=chunks)
