"""The loading warpgroup of the mixture chain: a block's weights, in the order of their use.

They wait for nothing but room in the ring, until the experts must have been chosen.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layer_chain.gpu_ahead import bring_near
from pallas_kernels.layer_chain.gpu_plan import TILE, UNIT, Plan
from pallas_kernels.mixture_chain.gpu_plan import Facts, Phase, units_of_expert


def share(units: int, plan: Plan, beside: int = 0) -> tuple[Any, Any]:
    """The units of this block: from, to; even together with those that are shared out `beside`."""
    block = lax.axis_index("block")
    blocks = jnp.int32(plan.blocks)

    def begin(number: Any) -> Any:
        return lax.div(number * (units + beside), blocks) - lax.div(number * beside, blocks)

    return begin(block), begin(block + 1)


def stream(facts: Facts, plan: Plan, phases: tuple[Phase, ...], refs: Any) -> None:
    """This block's weights of all phases, in order, as slots come free."""
    plgpu.set_max_registers(40, action="decrease")
    done = jnp.int32(facts.skipped)
    if Phase.OUT in phases:
        done = _stream_plain(facts, "out", plan, refs, done)
    if Phase.ROUTER in phases and facts.shared:
        done = _stream_plain(facts, "shared", plan, refs, done)
    if Phase.UP in phases or Phase.DOWN in phases:
        plgpu.barrier_wait(refs.known)
    if Phase.UP in phases:
        done = _stream_up(facts, plan, refs, done)
    if Phase.DOWN in phases:
        done = _stream_down(facts, plan, refs, done)
    if Phase.NEXT in phases and facts.fused is not None:
        done = _stream_plain(facts, "next", plan, refs, done)
        plgpu.barrier_wait(refs.seen)  # what blocks tell each other is not to wait for it
    if "ahead" in vars(refs):
        bring_near(refs.ahead, plan.blocks)
    if facts.skipped:
        pl.when(done <= plan.slots)(lambda: plgpu.barrier_wait(refs.opened))
    unseen = jnp.maximum(done - plan.slots, facts.skipped)

    @pl.loop(unseen, done)  # every release must be seen before the end
    def _drain(use: Any) -> None:
        plgpu.barrier_wait(refs.free.at[lax.rem(use, jnp.int32(plan.slots))])


def _each_step(
    facts: Facts, plan: Plan, refs: Any, turns: tuple[Any, Any], steps: int, done: Any, load: Any
) -> Any:
    """Call load(turn, columns, slot) for every step of these turns; returns the steps then done."""
    slots, count, (first, last) = jnp.int32(plan.slots), jnp.int32(steps), turns

    @pl.loop(0, (last - first) * steps)
    def _step(index: Any) -> None:
        use = done + index
        slot = lax.rem(use, slots)
        if facts.skipped:
            pl.when(use == slots)(lambda: plgpu.barrier_wait(refs.opened))
        is_again = use >= plan.slots + facts.skipped
        pl.when(is_again)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
        column = pl.multiple_of(lax.rem(index, count) * plan.columns, plan.columns)
        load(first + lax.div(index, count), pl.ds(column, plan.columns), slot)

    return done + (last - first) * steps


def _stream_plain(facts: Facts, name: str, plan: Plan, refs: Any, done: Any) -> Any:
    """The weight of a product, of which it is known beforehand."""
    stage = facts.stage(name)
    first, last = share(stage.units, plan)
    weight = getattr(refs, stage.weight)

    def load(turn: Any, across: Any, slot: Any) -> None:
        for half in range(2):
            if stage.gated:
                source = weight.at[half, _tile(turn), across]
            else:
                source = weight.at[_tile(2 * turn + half), across]
            _put(refs, source, slot, half)

    first, last = first * stage.passes, last * stage.passes
    return _each_step(facts, plan, refs, (first, last), stage.width // plan.columns, done, load)


def _stream_up(facts: Facts, plan: Plan, refs: Any, done: Any) -> Any:
    """Gate and up of the chosen experts: a turn is half of a unit, 8 rows of each."""
    stage = facts.stage("up")
    first, last = share(stage.units, plan, facts.stage("shared").units)
    turns = jnp.int32(stage.passes * units_of_expert(facts))

    def load(turn: Any, across: Any, slot: Any) -> None:
        expert = refs.listed[lax.div(turn, turns)]
        for half in range(2):
            _put(
                refs, refs.gate_up.at[expert, half, _tile(lax.rem(turn, turns)), across], slot, half
            )

    first, last = first * stage.passes, last * stage.passes
    return _each_step(facts, plan, refs, (first, last), stage.width // plan.columns, done, load)


def _put(refs: Any, source: Any, slot: Any, half: int) -> None:
    plgpu.copy_gmem_to_smem(source, refs.ring.at[2 * slot + half], refs.full.at[slot])


def _tile(number: Any) -> Any:
    return pl.ds(pl.multiple_of(number * TILE, TILE), TILE)


def _stream_down(facts: Facts, plan: Plan, refs: Any, done: Any) -> Any:
    """The same rows of all experts that the token visits."""
    first, last = share(facts.model // UNIT, plan)
    experts = [refs.listed[which] for which in range(facts.choice.top_k)]

    def load(unit: Any, across: Any, slot: Any) -> None:
        rows = pl.ds(pl.multiple_of(unit * UNIT, UNIT), UNIT)
        for which in range(facts.visited):
            if which < facts.choice.top_k:
                source = refs.down.at[experts[which], rows, across]
            else:
                part = (which - facts.choice.top_k) * facts.ffn
                within = pl.ds(pl.multiple_of(part + across.start, plan.columns), plan.columns)
                source = refs.shared_down.at[rows, within]
            half, place = divmod(which * UNIT, TILE)
            target = refs.ring.at[2 * slot + half, pl.ds(place, UNIT)]
            plgpu.copy_gmem_to_smem(source, target, refs.all_full.at[slot])

    return _each_step(facts, plan, refs, (first, last), facts.ffn // plan.columns, done, load)
