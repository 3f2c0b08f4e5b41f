"""The loading warpgroup of the mixture chain: a block's weights, in the order of their use.

They wait for room in the ring, until the experts must have been chosen, and for each other: what
blocks tell each other waits in the memory system behind all that has been asked for, so that not
more is asked for than keeps memory busy.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layer_chain.gpu_ahead import bring_near
from pallas_kernels.layer_chain.gpu_plan import ON_THEIR_WAY, TILE, UNIT, Plan
from pallas_kernels.mixture_chain.gpu_plan import Facts, Phase, units_of_expert


def share(units: int, plan: Plan, beside: int = 0) -> tuple[Any, Any]:
    """The units of this block: from, to; even together with those that are shared out `beside`."""
    block = lax.axis_index("block")
    blocks = jnp.int32(plan.blocks)

    def begin(number: Any) -> Any:
        return lax.div(number * (units + beside), blocks) - lax.div(number * beside, blocks)

    return begin(block), begin(block + 1)


def steps_of(units: tuple[Any, Any], each: int) -> Any:
    """The steps of these units; not negative, which spares the compiler signs of slots."""
    first, last = units
    return jnp.maximum((last - first) * each, 0)


def stream(facts: Facts, plan: Plan, phases: tuple[Phase, ...], refs: Any) -> None:
    """This block's weights of all phases, in order, as slots come free."""
    plgpu.set_max_registers(96, action="decrease")
    loader = _Loader(facts, plan, refs)
    if Phase.OUT in phases:
        loader.load_product("out")
    if Phase.ROUTER in phases and facts.shared:
        loader.load_product("shared")
    if Phase.UP in phases or Phase.DOWN in phases:
        plgpu.barrier_wait(refs.known)
    if Phase.UP in phases:
        loader.load_up()
    if Phase.DOWN in phases:
        loader.load_down()
    if Phase.NEXT in phases and facts.fused is not None:
        loader.load_product("next")
        plgpu.barrier_wait(refs.seen)  # what blocks tell each other is not to wait for it
    if "ahead" in vars(refs):
        bring_near(refs.ahead, plan.blocks)
    loader.drain()


class _Loader:
    """Step after step to slot after slot. done: the uses of slots so far; down: the first of those
    of the experts' last product, and the first behind: their weights arrive in more pieces.
    """

    def __init__(self, facts: Facts, plan: Plan, refs: Any) -> None:
        self.facts, self.plan, self.refs = facts, plan, refs
        self.done, self.down = jnp.int32(facts.skipped), None

    def load_product(self, name: str) -> None:
        """The weight of a product, of which it is known beforehand."""
        stage = self.facts.stage(name)
        first, last = share(stage.units, self.plan)
        weight = getattr(self.refs, stage.weight)

        def load(turn: Any, across: Any, slot: Any) -> None:
            for half in range(2):
                if stage.gated:
                    source = weight.at[half, _tile(turn), across]
                else:
                    source = weight.at[_tile(2 * turn + half), across]
                self._put(source, slot, half)

        turns = first * stage.passes, last * stage.passes
        self._each_step(turns, stage.width // self.plan.columns, load)

    def load_up(self) -> None:
        """Gate and up of the chosen experts: a turn is half of a unit, 8 rows of each."""
        facts, refs, stage = self.facts, self.refs, self.facts.stage("up")
        first, last = share(stage.units, self.plan, facts.stage("shared").units)
        each = jnp.int32(stage.passes * units_of_expert(facts))

        def load(turn: Any, across: Any, slot: Any) -> None:
            expert = refs.listed[lax.div(turn, each)]
            for half in range(2):
                source = refs.gate_up.at[expert, half, _tile(lax.rem(turn, each)), across]
                self._put(source, slot, half)

        turns = first * stage.passes, last * stage.passes
        self._each_step(turns, stage.width // self.plan.columns, load)

    def load_down(self) -> None:
        """The same rows of all experts that the token visits."""
        facts, plan, refs = self.facts, self.plan, self.refs
        units, steps = share(facts.model // UNIT, plan), facts.ffn // plan.columns
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

        self.down = self.done, self.done + steps_of(units, steps)
        self._each_step(units, steps, load)

    def drain(self) -> None:
        """Every arrival and every release must be seen before the end."""
        done, slots, skipped = self.done, self.plan.slots, self.facts.skipped
        if skipped:
            pl.when(done <= slots)(lambda: plgpu.barrier_wait(self.refs.opened))
        pl.loop(jnp.maximum(done - ON_THEIR_WAY, skipped), done)(self._await_arrival)

        @pl.loop(jnp.maximum(done - slots, skipped), done)
        def _release(use: Any) -> None:
            plgpu.barrier_wait(self.refs.free.at[self._slot(use)])

    def _each_step(self, turns: tuple[Any, Any], steps: int, load: Any) -> None:
        """Call load(turn, columns, slot) for every step of these turns."""
        plan, refs, done = self.plan, self.refs, self.done
        slots, count, total = jnp.int32(plan.slots), jnp.int32(steps), steps_of(turns, steps)

        @pl.loop(0, total)
        def _step(index: Any) -> None:
            use = done + index
            slot = self._slot(use)
            if self.facts.skipped:
                pl.when(use == slots)(lambda: plgpu.barrier_wait(refs.opened))
            is_again = use >= plan.slots + self.facts.skipped
            pl.when(is_again)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
            self._await_arrival(use - ON_THEIR_WAY)
            column = pl.multiple_of(lax.rem(index, count) * plan.columns, plan.columns)
            load(turns[0] + lax.div(index, count), pl.ds(column, plan.columns), slot)

        self.done = done + total

    def _await_arrival(self, use: Any) -> None:
        """Until the weights of this use are there; nothing where there is no such use."""
        slot, is_one, refs = self._slot(use), use >= self.facts.skipped, self.refs
        if self.down is None:
            pl.when(is_one)(lambda: plgpu.barrier_wait(refs.full.at[slot]))
            return
        is_down = (use >= self.down[0]) & (use < self.down[1])
        pl.when(is_one & ~is_down)(lambda: plgpu.barrier_wait(refs.full.at[slot]))
        pl.when(is_one & is_down)(lambda: plgpu.barrier_wait(refs.all_full.at[slot]))

    def _slot(self, use: Any) -> Any:
        return lax.rem(use, jnp.int32(self.plan.slots))

    def _put(self, source: Any, slot: Any, half: int) -> None:
        target = self.refs.ring.at[2 * slot + half]
        plgpu.copy_gmem_to_smem(source, target, self.refs.full.at[slot])


def _tile(number: Any) -> Any:
    return pl.ds(pl.multiple_of(number * TILE, TILE), TILE)
