"""The persistent kernel of the chain: weights stream on while tokens wait for each other.

A block of threads has two warpgroups. One loads weights, across the barriers between stages: they
depend on nothing, so memory never idles. The other computes: at each stage it waits until all
blocks have finished the one before, loads the tokens, and multiplies its share of the weight.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layer_chain.gpu_ahead import bring_near
from pallas_kernels.layer_chain.gpu_barrier import meet
from pallas_kernels.layer_chain.gpu_norm import norm_weights, normalise
from pallas_kernels.layer_chain.gpu_plan import (
    ON_THEIR_WAY,
    PARTS,
    TILE,
    UNIT,
    Plan,
    Problem,
    Stage,
)
from pallas_kernels.layer_chain.gpu_unit import SUMS, load_unit, store_unit, sum_parts


def launch(problem: Problem, plan: Plan, named: dict[str, Any]) -> None:
    """Run the problem's stages. named: weights, inputs, and Refs of results, all folded."""

    dtype = problem.dtype
    before = {} if problem.before is None else problem.before.scratch(dtype)

    def body(*refs: Any) -> None:
        given = dict(zip(named, refs, strict=False))
        scratch = ("ring", "tokens", "sums", "full", "free", "ready", *before)
        given.update(zip(scratch, refs[len(named) :], strict=True))
        warpgroup = lax.axis_index("warpgroup")
        here = SimpleNamespace(**given)
        pl.when(warpgroup == 0)(lambda: _compute(problem, plan, here))
        pl.when(warpgroup == 1)(lambda: _stream(problem, plan, here))

    swizzle = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    plgpu.kernel(
        body,
        scratch_types=[
            plgpu.SMEM((2 * plan.slots, TILE, plan.columns), dtype, transforms=swizzle),
            plgpu.SMEM(
                (plan.chunks, PARTS * problem.rows, plan.columns), dtype, transforms=swizzle
            ),
            plgpu.SMEM((2 * SUMS * PARTS,), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.slots),
            plgpu.Barrier(num_barriers=plan.slots),
            plgpu.Barrier(num_barriers=plan.chunks),
            *before.values(),
        ],
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        # All layouts are given here; to infer them takes the other semantics five seconds.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=problem.interpret,
    )(*named.values())


def _skipped(problem: Problem) -> int:
    """Slots of the ring that weights leave to others at first: uses are counted from there."""
    return 0 if problem.before is None else problem.before.slots


def _share(stage: Stage, plan: Plan) -> tuple[Any, Any]:
    """The units of this block: from, to."""
    block = lax.axis_index("block")
    return (
        lax.div(block * stage.units, jnp.int32(plan.blocks)),
        lax.div((block + 1) * stage.units, jnp.int32(plan.blocks)),
    )


def _stream(problem: Problem, plan: Plan, refs: Any) -> None:
    """The loading warpgroup: this block's weights of all stages, in order, as slots come free."""
    plgpu.set_max_registers(40, action="decrease")
    slots, skipped = jnp.int32(plan.slots), _skipped(problem)

    def await_arrival(use: Any) -> None:
        plgpu.barrier_wait(refs.full.at[lax.rem(use, slots)])

    done = jnp.int32(skipped)
    for stage in problem.stages:
        first, last = _share(stage, plan)
        steps = stage.width // plan.columns
        weight = getattr(refs, stage.weight)
        start = first * stage.passes

        @pl.loop(0, (last - first) * stage.passes * steps)
        def _step(
            index: Any,
            done: Any = done,
            start: Any = start,
            weight: Any = weight,
            stage: Stage = stage,
        ) -> None:
            use = done + index
            slot = lax.rem(use, slots)

            if skipped:
                pl.when(use == slots)(lambda: plgpu.barrier_wait(refs.opened))

            @pl.when(use >= plan.slots + skipped)
            def _reuse() -> None:
                plgpu.barrier_wait(refs.free.at[slot])

            before = use - ON_THEIR_WAY
            pl.when(before >= skipped)(lambda: await_arrival(before))
            for half in range(2):
                at = _tile(stage, plan, start, index, half)
                plgpu.copy_gmem_to_smem(
                    weight.at[at], refs.ring.at[2 * slot + half], refs.full.at[slot]
                )

        done += (last - first) * stage.passes * steps

    if "ahead" in vars(refs):
        bring_near(refs.ahead, plan.blocks)

    if skipped:
        pl.when(done <= slots)(lambda: plgpu.barrier_wait(refs.opened))
    pl.loop(jnp.maximum(done - ON_THEIR_WAY, skipped), done)(await_arrival)

    @pl.loop(jnp.maximum(done - slots, skipped), done)  # every release must be seen before the end
    def _drain(use: Any) -> None:
        plgpu.barrier_wait(refs.free.at[lax.rem(use, slots)])


def _tile(stage: Stage, plan: Plan, start: Any, index: Any, half: int) -> tuple[Any, ...]:
    """Where a tile of the folded weight lies: of a block's step `index` after its pass `start`."""
    steps = jnp.int32(stage.width // plan.columns)
    turn = start + lax.div(index, steps)
    column = pl.multiple_of(lax.rem(index, steps) * plan.columns, 64)
    across = pl.ds(column, plan.columns)
    if stage.gated:
        return half, pl.ds(pl.multiple_of(turn * TILE, TILE), TILE), across
    return pl.ds(pl.multiple_of((2 * turn + half) * TILE, TILE), TILE), across


def _compute(problem: Problem, plan: Plan, refs: Any) -> None:
    """The computing warpgroup: stage after stage."""
    plgpu.set_max_registers(232, action="increase")
    done = jnp.int32(_skipped(problem))
    if problem.before is not None:
        problem.before.run(problem, plan, refs)
    for number, stage in enumerate(problem.stages):
        first, last = _share(stage, plan)
        steps = stage.width // plan.columns
        weights = norm_weights(problem, plan, stage, refs) if stage.norm else None
        if number or problem.before is not None:
            meet(refs.state, plan.blocks)
        total = (last - first) * stage.passes * steps
        Tokens(problem, plan, stage, refs, total).begin(weights)

        @pl.loop(first, last)
        def _unit(
            unit: Any,
            stage: Stage = stage,
            done: Any = done,
            first: Any = first,
            total: Any = total,
            steps: int = steps,
        ) -> None:
            tokens = Tokens(problem, plan, stage, refs, total)
            addend = _addend(problem, stage, refs, unit)
            for turn in range(stage.passes):
                before = ((unit - first) * stage.passes + turn) * steps
                products = products_of_unit(problem, plan, stage, refs, tokens, done, before)
                for half, value in enumerate(products):
                    keep_diagonals(problem, stage, refs, value, turn, half)
            plgpu.commit_smem()
            _finish(problem, stage, refs, unit, addend)

        done += total


class Tokens:
    """A stage's input in shared memory: whole, or chunk after chunk where it does not fit."""

    def __init__(self, problem: Problem, plan: Plan, stage: Stage, refs: Any, total: Any) -> None:
        self.refs, self.plan, self.total = refs, plan, total
        self.steps = stage.width // plan.columns
        self.whole = self.steps <= plan.chunks
        self.problem, self.stage = problem, stage

    def _load(self, use: Any) -> None:
        """The chunk of this use; a use is a step of the stage."""
        chunk, slot = lax.rem(use, jnp.int32(self.steps)), lax.rem(use, jnp.int32(self.plan.chunks))
        across = pl.ds(pl.multiple_of(chunk * self.plan.columns, 64), self.plan.columns)
        source = getattr(self.refs, self.stage.source).at[:, across]
        plgpu.copy_gmem_to_smem(source, self.refs.tokens.at[slot], self.refs.ready.at[slot])

    def begin(self, weights: Any) -> None:
        """Load what fits; normalise it where the stage wants it."""
        if self.whole:
            for chunk in range(self.steps):
                self._load(jnp.int32(chunk))
            for chunk in range(self.steps):
                plgpu.barrier_wait(self.refs.ready.at[chunk])
            if weights is not None:
                normalise(self.problem, self.plan, self.stage, self.refs, weights)
            return
        for chunk in range(self.plan.chunks):
            pl.when(chunk < self.total)(lambda chunk=chunk: self._load(jnp.int32(chunk)))

    def take(self, use: Any, step: Any) -> Any:
        """The chunk of this step, ready to be multiplied."""
        if self.whole:
            return self.refs.tokens.at[step]
        slot = lax.rem(use, jnp.int32(self.plan.chunks))
        plgpu.barrier_wait(self.refs.ready.at[slot])
        return self.refs.tokens.at[slot]

    def give(self, use: Any) -> None:
        """The chunk of this use has been multiplied."""
        if self.whole:
            return
        plgpu.commit_smem()  # all warps are done with it
        ahead = use + self.plan.chunks
        pl.when(ahead < self.total)(lambda: self._load(ahead))


def products_of_unit(
    problem: Problem, plan: Plan, stage: Stage, refs: Any, tokens: Tokens, done: Any, before: Any
) -> tuple[jax.Array, jax.Array]:
    """The two tiles of one pass over the input: [TILE, PARTS * rows] each, float32."""
    steps, slots = stage.width // plan.columns, jnp.int32(plan.slots)

    def product(upper: Any, lower: Any) -> tuple[jax.Array, jax.Array]:
        @pl.loop(0, steps)
        def _step(step: Any) -> None:
            use = before + step
            slot = lax.rem(done + use, slots)
            chunk = tokens.take(use, step)
            plgpu.barrier_wait(refs.full.at[slot])
            plgpu.wgmma(upper, refs.ring.at[2 * slot], chunk.transpose((1, 0)))
            plgpu.wgmma(lower, refs.ring.at[2 * slot + 1], chunk.transpose((1, 0)))
            plgpu.wgmma_wait(2)  # the products of the step before are done

            @pl.when(step > 0)
            def _release() -> None:
                plgpu.barrier_arrive(refs.free.at[lax.rem(done + use - 1, slots)])
                tokens.give(use - 1)

        return upper[...], lower[...]

    shape = plgpu.ACC((TILE, PARTS * problem.rows), jnp.float32)
    values = pl.run_scoped(product, shape, shape)
    last = before + steps - 1
    plgpu.barrier_arrive(refs.free.at[lax.rem(done + last, slots)])
    tokens.give(last)
    return values


def keep_diagonals(
    problem: Problem, stage: Stage, refs: Any, value: jax.Array, turn: int, half: int
) -> None:
    """The sums of the parts, for each row of the weight and each token, to shared memory.

    They lie by (gate or up, token, row of the weight, part).
    """
    shape, layout = (TILE, PARTS), plgpu.Layout.WGMMA
    part = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) & (PARTS - 1)
    own = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) == part
    which, eight = (half, turn) if stage.gated else (0, half)
    for row in range(problem.rows):
        block = value[:, row * PARTS : (row + 1) * PARTS]
        at = (which * SUMS + row * UNIT + eight * PARTS) * PARTS
        refs.sums[pl.ds(at, TILE)] = jnp.where(own, block, jnp.zeros_like(block)).sum(axis=1)


def _place(stage: Stage, unit: Any) -> tuple[Any, Any]:
    """Where a unit of the first token's output lies in its folded array."""
    per_part = jnp.int32(stage.outer // PARTS // UNIT)
    column = pl.multiple_of(lax.rem(unit, per_part) * UNIT, UNIT)
    return lax.div(unit, per_part), pl.ds(column, UNIT)


def _addend(problem: Problem, stage: Stage, refs: Any, unit: Any) -> jax.Array | None:
    """What is to be added to a unit's results: on its way while the unit is computed."""
    if stage.addend is None:
        return None
    first = getattr(refs, stage.addend), _place(stage, unit)
    stride = 0 if stage.bias else stage.outer
    return load_unit(first, problem.rows, stride, bool(problem.interpret))


def _finish(problem: Problem, stage: Stage, refs: Any, unit: Any, addend: jax.Array | None) -> None:
    """Add up a unit's parts, do what is elementwise, and store it."""

    def product(which: int) -> jax.Array:
        parts = refs.sums.at[pl.ds(which * SUMS * PARTS, SUMS * PARTS)]
        value = sum_parts(parts, bool(problem.interpret))
        return value.astype(problem.dtype).astype(jnp.float32)  # as each product alone is rounded

    value = product(0)
    if stage.gated:
        value = ACTIVATIONS[problem.activation](value) * product(1)
    if addend is not None:
        value += addend.astype(jnp.float32)
    first = getattr(refs, stage.result), _place(stage, unit)
    value = value.astype(problem.dtype)
    store_unit(first, value, problem.rows, stage.outer, bool(problem.interpret))


def _silu(x: jax.Array) -> jax.Array:
    return x / (1 + jnp.exp(-x))


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}
