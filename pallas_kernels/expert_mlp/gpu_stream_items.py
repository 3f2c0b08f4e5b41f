"""The items of work of gpu_stream: blocks of a weight's rows, each with one run of tiles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.expert_mlp.checks import Gate

BLOCK = 64  # rows of a weight that one product of the matrix unit takes
HALVES = 2  # such blocks that a step takes: of the gate and of up, or of down twice


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """sms: blocks of threads; columns: activation rows of a tile, a multiple of 8.

    high: activation rows of the longest run, which is a whole number of tiles.
    depth: elements of a weight row that a step takes; slots: steps in flight. chained: both
    products in one kernel, which needs all blocks of threads to run at the same time.
    """

    sms: int
    columns: int
    high: int
    depth: int
    slots: int
    chained: bool = True

    @property
    def in_runs(self) -> bool:
        """Whether some runs may have several tiles."""
        return self.high > self.columns


@dataclass(frozen=True, slots=True)
class Product:
    """The static facts of one product: gate None means a plain one (down).

    listed: as of few_rows; then `runs` is the number of runs, else it is read from memory.
    """

    shared: bool
    listed: int | None
    runs: int
    dtype: Any
    gate: Gate | None
    bias: bool
    gathered: bool
    waits: bool
    inputs: int
    outputs: int

    @property
    def halves(self) -> int:
        """Blocks of weight rows of a step."""
        return HALVES if self.gate is not None or self.outputs % (2 * BLOCK) == 0 else 1

    @property
    def width(self) -> int:
        """Columns of the output that one item of work makes."""
        return BLOCK if self.gate is not None else BLOCK * self.halves

    @property
    def blocks(self) -> int:
        """Items of work of a run."""
        return self.outputs // self.width


def each_item(
    product: Product, plan: StreamPlan, refs: Any, sm: Any, before: Any, visit: Any
) -> Any:
    """Call visit(run, block, turn, steps done) for an SM's items.

    before: steps done of other products. Returns the steps done after all items.
    """
    steps, blocks = product.inputs // plan.depth, jnp.int32(product.blocks)
    fixed = product.listed is not None  # which spares the kernel's first wait for memory
    runs = jnp.int32(product.runs) if fixed else refs.ends[refs.ends.shape[0] - 1]
    items = runs * blocks
    turns = lax.div(items - sm + (plan.sms - 1), jnp.int32(plan.sms))

    @pl.loop(0, turns)
    def _item(turn: Any) -> None:
        item = sm + turn * plan.sms
        visit(lax.div(item, blocks), lax.rem(item, blocks), turn, before + turn * steps)

    return before + turns * steps


def tiles_of(plan: StreamPlan, refs: Any, run: Any) -> tuple[Any, Any]:
    """A run's first tile, and how many it has."""
    if not plan.in_runs:
        return run, jnp.int32(1)
    together = plan.high // plan.columns
    first = refs.offsets[run] + run * together
    return first, jnp.minimum(refs.tile_ends[run] - first, together)


def as_high(plan: StreamPlan, count: Any, visit: Callable[[int], None]) -> None:
    """Call visit(activation rows) for a run of `count` tiles: one tile's, or the longest run's."""
    if not plan.in_runs:
        visit(plan.columns)
        return
    pl.when(count == 1)(lambda: visit(plan.columns))
    pl.when(count > 1)(lambda: visit(plan.high))


def expert_of(product: Product, refs: Any, run: Any) -> Any:
    """The expert of a run."""
    if product.listed is None:
        return refs.experts[run]
    experts = refs.weight.shape[0]
    found = refs.experts[jnp.minimum(run, product.listed - 1)]
    found = jnp.minimum(jnp.maximum(found, 0), experts - 1)
    return jnp.where(run < product.listed, found, experts + run - product.listed)


def rows_from(first: Any) -> Any:
    """A block of rows of a weight, or of as many columns of what it makes."""
    return pl.ds(pl.multiple_of(first, BLOCK), BLOCK)
