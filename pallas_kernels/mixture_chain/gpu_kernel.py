"""The persistent kernel of the mixture chain: weights stream on while tokens wait for each other.

A block of threads has two warpgroups, as in layer_chain. One loads weights: across the barriers
between phases, but for the experts', which must have been chosen. The other computes. What it sends
to all blocks are words that say by themselves whether they are there; only the experts' hidden
layers, which are long, lie behind a barrier of the whole grid. What needs no other block is asked
for before a wait for others: behind it, each such load would be a wait of its own.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layer_chain.gpu_barrier import meet
from pallas_kernels.layer_chain.gpu_kernel import (
    ACTIVATIONS,
    Tokens,
    keep_diagonals,
    products_of_unit,
)
from pallas_kernels.layer_chain.gpu_norm import norm_weights
from pallas_kernels.layer_chain.gpu_plan import PARTS, TILE, UNIT, Plan, Stage
from pallas_kernels.layer_chain.gpu_unit import SUMS, load_unit, store_unit, sum_parts
from pallas_kernels.mixture_chain.gpu_choice import LISTED, choose, shares_of
from pallas_kernels.mixture_chain.gpu_plan import MEETINGS, ROUND, Facts, Phase, units_of_expert
from pallas_kernels.mixture_chain.gpu_stream import share, steps_of, stream
from pallas_kernels.mixture_chain.gpu_tokens import (
    find_scores,
    keep,
    normalise,
    own_expert,
    router_row,
    take,
    take_scores,
)
from pallas_kernels.mixture_chain.gpu_words import send

SENT = ("middle", "stream")  # what all blocks wait for
_NARROW = plgpu.Layout.WG_STRIDED((SUMS,), vec_size=1)


def launch(facts: Facts, plan: Plan, phases: tuple[Phase, ...], named: dict[str, Any]) -> None:
    """Run some phases, and before them what is done before. named: weights, inputs, and Refs of
    results, as gpu.py folds them.
    """
    swizzle = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    before = {} if facts.before is None else facts.before.scratch(facts.dtype)
    line = before.pop("line", None)  # of no use any more when there are tokens
    tokens = plgpu.SMEM((plan.chunks, PARTS, plan.columns), facts.dtype, transforms=swizzle)
    scratch = {
        "ring": plgpu.SMEM((2 * plan.slots, TILE, plan.columns), facts.dtype, transforms=swizzle),
        "tokens": tokens if line is None else plgpu.RefUnion(tokens, line),
        "sums": plgpu.SMEM((2 * SUMS * PARTS,), jnp.float32),
        "listed": plgpu.SMEM((LISTED,), jnp.int32),
        "best": plgpu.SMEM((LISTED,), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=plan.slots),
        "all_full": plgpu.Barrier(num_arrivals=facts.visited, num_barriers=plan.slots),
        "free": plgpu.Barrier(num_barriers=plan.slots),
        "ready": plgpu.Barrier(num_barriers=plan.chunks),
        "known": plgpu.Barrier(),  # the experts
        "seen": plgpu.Barrier(),  # the whole stream behind them
        **before,
    }

    def mixture_chain(*refs: Any) -> None:
        here = SimpleNamespace(**dict(zip((*named, *scratch), refs, strict=True)))
        if line is not None:
            here.tokens, here.line = here.tokens
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(lambda: _compute(facts, plan, phases, here))
        pl.when(warpgroup == 1)(lambda: stream(facts, plan, phases, here))

    plgpu.kernel(
        mixture_chain,
        scratch_types=list(scratch.values()),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        # All layouts are given here; to infer them takes the other semantics five seconds.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=facts.interpret,
    )(*named.values())


def _compute(facts: Facts, plan: Plan, phases: tuple[Phase, ...], refs: Any) -> None:
    """Phase after phase."""
    # What is asked for before a wait stays in registers until after it.
    plgpu.set_max_registers(248, action="increase")
    together, done = len(phases) > 1, jnp.int32(facts.skipped)
    if together:
        refs.round = refs.state[ROUND] + 1
    if facts.before is not None:
        facts.before.run(facts.problem, plan, refs)
    addend = _first_addend(facts, plan, "out", refs) if Phase.OUT in phases else None
    deciding = _deciding(facts, plan, refs) if Phase.ROUTER in phases else None
    if Phase.OUT in phases:
        stage = facts.stage("out")
        if facts.before is None:
            _take_tokens(facts, plan, stage, refs)
        else:
            keep(refs, take(facts, plan, refs, stage))
        done = _plain(facts, plan, stage, refs, done, addend)
    if deciding is not None:
        done = _router(facts, plan, refs, done, together, deciding)
    addend = _first_addend(facts, plan, "down", refs) if Phase.DOWN in phases else None
    is_last = Phase.NEXT in phases and facts.fused is not None
    next_norm = norm_weights(facts.problem, plan, facts.stage("next"), refs) if is_last else None
    if not together and (Phase.UP in phases or Phase.DOWN in phases):
        refs.shares = _choose(facts, refs)
    if Phase.UP in phases:
        stage = facts.stage("up")
        if not together:
            weights = norm_weights(facts.problem, plan, stage, refs)
            _take_stream(facts, plan, stage, refs, weights)
        done = _plain(facts, plan, stage, refs, done)
        if together:
            meet(refs.state.at[pl.ds(MEETINGS, 1)], plan.blocks)
            _end_round(refs)  # everyone has read which one it is
    if Phase.DOWN in phases:
        done = _down(facts, plan, refs, done, addend)
    if next_norm is not None:
        stage = facts.stage("next")
        _take_stream(facts, plan, stage, refs, next_norm)
        _plain(facts, plan, stage, refs, done)


def _deciding(facts: Facts, plan: Plan, refs: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    """What this block decides on the experts with: a row of the router, the norm's weights."""
    row = router_row(facts, plan, refs, own_expert(facts))
    return row, norm_weights(facts.problem, plan, facts.stage("up"), refs)


def _router(
    facts: Facts,
    plan: Plan,
    refs: Any,
    done: Any,
    together: bool,
    deciding: tuple[list[jax.Array], list[jax.Array]],
) -> Any:
    """What decides on the experts, and the shared expert's first product."""
    stage, (row, weights) = facts.stage("shared"), deciding
    tokens = normalise(facts, take(facts, plan, refs, facts.stage("up")), weights)
    find_scores(facts, plan, refs, tokens, row)
    keep(refs, tokens)
    if together:
        refs.shares = _choose(facts, refs)
    return _plain(facts, plan, stage, refs, done) if facts.shared else done


def _choose(facts: Facts, refs: Any) -> list[jax.Array]:
    """Tells the loading warpgroup the experts; returns their shares."""
    scores, interpret = take_scores(facts, refs), bool(facts.interpret)
    choose(scores, refs.listed, refs.best, facts.choice, interpret)
    plgpu.barrier_arrive(refs.known)
    return shares_of(scores, refs.best, facts.choice, interpret)


def _end_round(refs: Any) -> None:
    @pl.when(lax.axis_index("block") == 0)
    def _first() -> None:
        refs.state[ROUND] = refs.round


def _take_stream(
    facts: Facts, plan: Plan, stage: Stage, refs: Any, weights: list[jax.Array]
) -> None:
    values = take(facts, plan, refs, stage)
    if stage.result == "fused":
        plgpu.barrier_arrive(refs.seen)
    keep(refs, normalise(facts, values, weights))


def _take_tokens(facts: Facts, plan: Plan, stage: Stage, refs: Any) -> None:
    Tokens(facts.problem, plan, stage, refs, jnp.int32(0)).begin(None)


def _plain(
    facts: Facts,
    plan: Plan,
    stage: Stage,
    refs: Any,
    done: Any,
    addend: jax.Array | None = None,
) -> Any:
    """This block's units of a product with rows in parts; the tokens are there. addend: the first
    unit's, where the product has one.
    """
    first, last = share(stage.units, plan, facts.shared // UNIT if stage.weight == "gate_up" else 0)
    steps = stage.width // plan.columns
    tokens = Tokens(facts.problem, plan, stage, refs, jnp.int32(0))

    def compute(unit: Any, addend: jax.Array | None) -> None:
        for turn in range(stage.passes):
            before = ((unit - first) * stage.passes + turn) * steps
            products = products_of_unit(facts.problem, plan, stage, refs, tokens, done, before)
            for half, value in enumerate(products):
                keep_diagonals(facts.problem, stage, refs, value, turn, half)
        plgpu.commit_smem()
        _finish(facts, stage, refs, unit, addend)

    _each_unit(facts, stage, refs, (first, last), compute, addend)
    return done + steps_of((first, last), stage.passes * steps)


def _each_unit(
    facts: Facts,
    stage: Stage,
    refs: Any,
    units: tuple[Any, Any],
    compute: Any,
    addend: jax.Array | None,
) -> None:
    """Call compute(unit, addend) for each; an addend, from the first one's on, is on its way while
    the unit before it is computed.
    """
    first, last = units
    if addend is None:
        pl.loop(first, last)(lambda unit: compute(unit, None))
        return

    def one(unit: Any, addend: jax.Array) -> jax.Array:
        following = _addend(facts, stage, refs, jnp.minimum(unit + 1, last - 1))
        compute(unit, addend)
        return following

    lax.fori_loop(first, last, one, addend)


def _first_addend(facts: Facts, plan: Plan, name: str, refs: Any) -> jax.Array:
    """The addend of this block's first unit: "residual", or what this block itself has written of
    "middle".
    """
    stage = facts.stage(name)
    return _addend(facts, stage, refs, share(stage.units, plan)[0])


def _place(stage: Stage, facts: Facts, unit: Any) -> tuple[Any, Any]:
    """Where a unit lies in the result or addend of a product."""
    if stage.result == "fused":
        return jnp.int32(0), pl.ds(pl.multiple_of(unit * UNIT, UNIT), UNIT)
    if stage.result == "hidden":
        each = jnp.int32(units_of_expert(facts))
        unit = unit + (facts.choice.top_k * each if stage.weight == "shared_gate_up" else 0)
    else:
        each = jnp.int32(stage.outer // PARTS // UNIT)
    column = pl.multiple_of(lax.rem(unit, each) * UNIT, UNIT)
    return lax.div(unit, each), pl.ds(column, UNIT)


def _addend(facts: Facts, stage: Stage, refs: Any, unit: Any) -> jax.Array:
    """What is to be added to a unit's results."""
    assert stage.addend is not None, f"{stage.weight} has no addend"
    first = getattr(refs, stage.addend), _place(stage, facts, unit)
    return load_unit(first, 1, 0, bool(facts.interpret))


def _finish(facts: Facts, stage: Stage, refs: Any, unit: Any, addend: jax.Array | None) -> None:
    """Add up a unit's parts, do what is elementwise, and store it."""
    interpret = bool(facts.interpret)

    def product(which: int) -> jax.Array:
        parts = refs.sums.at[pl.ds(which * SUMS * PARTS, SUMS * PARTS)]
        return sum_parts(parts, interpret)

    value = _rounded(facts, product(0))
    if stage.gated:
        value = ACTIVATIONS[facts.activation](value) * _rounded(facts, product(1))
    _store(facts, stage, refs, unit, value, addend)


def _rounded(facts: Facts, value: jax.Array) -> jax.Array:
    return value.astype(facts.dtype).astype(jnp.float32)  # as each product alone is rounded


def _store(
    facts: Facts, stage: Stage, refs: Any, unit: Any, value: jax.Array, addend: jax.Array | None
) -> None:
    if addend is not None:
        value += addend.astype(jnp.float32)
    first = getattr(refs, stage.result), _place(stage, facts, unit)
    value = value.astype(facts.dtype)
    store_unit(first, value, 1, 0, bool(facts.interpret))
    if stage.result in SENT and not facts.interpret:
        start = pl.multiple_of(facts.words(stage.result) + unit * UNIT, UNIT)
        send(refs.state.at[pl.ds(start, UNIT)], value, refs.round)


def _down(facts: Facts, plan: Plan, refs: Any, done: Any, addend: jax.Array | None) -> Any:
    """This block's units of the experts' last product, and the sum over the experts."""
    stage = facts.stage("down")
    first, last = share(stage.units, plan)
    steps = facts.ffn // plan.columns
    _take_tokens(facts, plan, stage, refs)
    tokens = Tokens(facts.problem, plan, stage, refs, jnp.int32(0))
    filled = SimpleNamespace(**(vars(refs) | {"full": refs.all_full}))

    def compute(unit: Any, addend: jax.Array | None) -> None:
        products = products_of_unit(
            facts.problem, plan, stage, filled, tokens, done, (unit - first) * steps
        )
        for half, value in enumerate(products):
            refs.sums[pl.ds(half * TILE, TILE)] = _of_own_expert(value, half)
        plgpu.commit_smem()
        total = None
        for which in range(facts.visited):
            mine = refs.sums.at[pl.ds(which * UNIT, SUMS)]  # the first UNIT are wanted
            part = _rounded(facts, plgpu.load(mine, layout=_NARROW, optimized=False))
            if which < facts.choice.top_k:
                part = part * refs.shares[which]
            total = part if total is None else total + part
        _store(facts, stage, refs, unit, total, addend)

    _each_unit(facts, stage, refs, (first, last), compute, addend)
    return done + (last - first) * steps


def _of_own_expert(value: jax.Array, half: int) -> jax.Array:
    """[TILE]: of each expert's rows of a weight the product with what that expert has hidden."""
    shape, layout = (TILE, PARTS), plgpu.Layout.WGMMA
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    expert = lax.shift_right_logical(row, jnp.full_like(row, 4)) + half * (TILE // UNIT)
    own = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) == expert
    return jnp.where(own, value, jnp.zeros_like(value)).sum(axis=1)
