"""The loading warpgroup of gpu_stream: weights and activations of every step, in order."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.expert_mlp.gpu_stream_items import (
    BLOCK,
    Product,
    StreamPlan,
    as_high,
    each_item,
    expert_of,
    rows_from,
    tiles_of,
)


def stream(products: tuple[Product, ...], plan: StreamPlan, views: list[Any], sm: Any) -> None:
    """The loading warpgroup: weights and activations of every step, in order."""
    plgpu.set_max_registers(40, action="decrease")
    uses, free = jnp.int32(0), views[0].free
    for product, refs in zip(products, views, strict=True):
        load = partial(_load_item, product, plan, refs)
        uses = each_item(product, plan, refs, sm, uses, load)

    @pl.loop(jnp.maximum(uses - plan.slots, 0), uses)  # every release must be seen before the end
    def _drain(use: Any) -> None:
        plgpu.barrier_wait(free.at[lax.rem(use, jnp.int32(plan.slots))])


def _load_item(
    product: Product, plan: StreamPlan, refs: Any, run: Any, block: Any, turn: Any, done: Any
) -> None:
    """The steps of one item; of the first that waits for its rows, the weights go ahead."""
    expert = expert_of(product, refs, run)
    tile, count = tiles_of(plan, refs, run)
    row = pl.multiple_of(tile * plan.columns * int(product.gathered), 8)
    first, steps = block * product.width, product.inputs // plan.depth

    def slot(step: Any) -> Any:
        return lax.rem(done + step, jnp.int32(plan.slots))

    def put_weights(step: Any) -> None:
        at = slot(step)
        pl.when(done + step >= plan.slots)(lambda: plgpu.barrier_wait(refs.free.at[at]))
        _load_weights(product, plan, refs, expert, first, step * plan.depth, at)

    def put_rows(step: Any) -> None:
        at, along = slot(step), _along(plan, step * plan.depth)

        def put(high: int) -> None:
            source = refs.rows.at[pl.ds(row, high), along]
            target = refs.columns.at[at, pl.ds(0, high)]
            plgpu.copy_gmem_to_smem(source, target, refs.full.at[at])

        as_high(plan, count, put)

    ahead = jnp.int32(0)
    if product.waits:
        ahead = jnp.where(turn == 0, jnp.int32(min(plan.slots, steps)), 0)
        pl.loop(0, ahead)(put_weights)
        # All of this run's first product; nobody waits before having done its share of that.
        needed = product.inputs // BLOCK
        plgpu.semaphore_wait(refs.ready.at[run], needed, decrement=False, memory_scope="gpu")
        pl.loop(0, ahead)(put_rows)

    @pl.loop(ahead, steps)
    def _step(step: Any) -> None:
        put_weights(step)
        put_rows(step)


def _load_weights(
    product: Product, plan: StreamPlan, refs: Any, expert: Any, first: Any, begin: Any, slot: Any
) -> None:
    """The weights of one step: rows from `first` on, elements from `begin` on."""

    def load(weight: Any, first: Any, begin: Any) -> None:
        for half in range(product.halves):
            if product.gate is not None:
                source = weight.at[half, rows_from(first), _along(plan, begin)]
            else:
                source = weight.at[rows_from(first + half * BLOCK), _along(plan, begin)]
            plgpu.copy_gmem_to_smem(source, refs.weights.at[slot, half], refs.full.at[slot])

    if not product.shared:
        load(refs.weight.at[expert], first, begin)
        return
    experts = refs.weight.shape[0]
    pl.when(expert < experts)(lambda: load(refs.weight.at[expert], first, begin))

    @pl.when(expert >= experts)
    def _shared() -> None:
        part = expert - experts
        if product.gate is not None:
            load(refs.shared, part * product.outputs + first, begin)
        else:
            load(refs.shared, first, part * product.inputs + begin)


def _along(plan: StreamPlan, begin: Any) -> Any:
    return pl.ds(pl.multiple_of(begin, plan.depth), plan.depth)
