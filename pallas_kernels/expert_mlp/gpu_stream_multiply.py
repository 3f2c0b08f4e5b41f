"""The computing warpgroup of gpu_stream: an item's products, their gate, and where they go."""

from functools import partial
from typing import Any

import jax
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

PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def multiply(products: tuple[Product, ...], plan: StreamPlan, views: list[Any], sm: Any) -> None:
    """The computing warpgroup."""
    plgpu.set_max_registers(232, action="increase")
    uses, counted = jnp.int32(0), len(products) > 1
    for product, refs in zip(products, views, strict=True):
        compute = partial(_compute_item, product, plan, refs, counted and product.gate is not None)
        uses = each_item(product, plan, refs, sm, uses, compute)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _compute_item(
    product: Product,
    plan: StreamPlan,
    refs: Any,
    counted: bool,
    run: Any,
    block: Any,
    turn: Any,
    done: Any,
) -> None:
    """One item; counted: the run's counter is told when the results are in memory."""
    del turn
    tile, count = tiles_of(plan, refs, run)
    as_high(plan, count, partial(_compute, product, plan, refs, run, block, done))
    plgpu.commit_smem()

    @pl.loop(0, count)
    def _store(each: Any) -> None:
        mine = pl.ds(pl.multiple_of(each * plan.columns, 8), plan.columns)
        places = pl.ds((tile + each) * plan.columns, plan.columns)
        for half in range(1 if product.gate is not None else product.halves):
            across = rows_from(block * product.width + half * BLOCK)
            plgpu.copy_smem_to_gmem(refs.results.at[half, mine], refs.out.at[places, across])

    if counted:
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal(refs.ready.at[run], 1, memory_scope="gpu")


def _compute(
    product: Product, plan: StreamPlan, refs: Any, run: Any, block: Any, done: Any, high: int
) -> None:
    """One item's results, of so many rows of activations, to shared memory."""

    def products(*sums: Any) -> tuple[jax.Array, ...]:
        @pl.loop(0, product.inputs // plan.depth)
        def _step(step: Any) -> None:
            slot = lax.rem(done + step, jnp.int32(plan.slots))
            plgpu.barrier_wait(refs.full.at[slot])
            columns = refs.columns.at[slot, pl.ds(0, high)].transpose((1, 0))
            for half, total in enumerate(sums):
                plgpu.wgmma(total, refs.weights.at[slot, half], columns)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs.free.at[slot])

        return tuple(total[...] for total in sums)

    shape = plgpu.ACC((BLOCK, high), jnp.float32)
    sums = pl.run_scoped(products, *[shape] * product.halves)
    if product.gate is not None:
        if product.bias:
            sums = _with_bias(refs, sums, expert_of(product, refs, run), block)
        sums = (product.gate(*sums),)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stores of the item before
    for half, value in enumerate(sums):
        target = refs.results.at[half, pl.ds(0, high)]
        target.transpose((1, 0))[...] = value.astype(product.dtype)


def _with_bias(refs: Any, sums: Any, expert: Any, block: Any) -> Any:
    added = []
    for half, total in enumerate(sums):
        source = refs.bias.at[expert, half, rows_from(block * BLOCK)]
        bias = plgpu.load(source, layout=PER_ROW, optimized=False)
        added.append(total + lax.broadcast_in_dim(bias, total.shape, [0]))
    return tuple(added)
