"""The token on its way into the products: normalised in registers.

A thread holds the same places of the stream, of the norm's weight and of a row of the router, so
that each block of threads finds the score of an expert without a look at shared memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layer_chain.gpu_norm import layout_of
from pallas_kernels.layer_chain.gpu_plan import PARTS, Plan, Stage
from pallas_kernels.mixture_chain.gpu_plan import Facts
from pallas_kernels.mixture_chain.gpu_words import receive, receive_scores, send_score


def take(facts: Facts, plan: Plan, refs: Any, stage: Stage) -> list[jax.Array]:
    """A stage's input in chunks [PARTS, columns], as soon as all blocks have sent their parts."""
    if facts.interpret:
        return _chunks(getattr(refs, stage.source), stage.width, plan)
    words = refs.state.at[pl.ds(facts.words(stage.source), stage.inner)]
    is_long = stage.source == "attended"
    return receive(words, stage.width, plan.columns, refs.round, is_long=is_long)


def normalise(facts: Facts, values: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
    """x / rms(x) * weight, rounded where the plain norm rounds."""
    squares = sum(jnp.square(value.astype(jnp.float32)) for value in values)
    factor = lax.rsqrt(_total(squares) / facts.model + facts.eps)
    return [
        (value.astype(jnp.float32) * factor).astype(facts.dtype) * weight
        for value, weight in zip(values, weights, strict=True)
    ]


def keep(refs: Any, chunks: list[jax.Array]) -> None:
    """To where the products read the tokens."""
    for number, chunk in enumerate(chunks):
        refs.tokens.at[number][...] = chunk
    plgpu.commit_smem()


def router_row(facts: Facts, plan: Plan, refs: Any, expert: Any) -> list[jax.Array]:
    """What decides on an expert, in chunks like the stream's."""
    rows = refs.router.at[pl.ds(pl.multiple_of(expert * PARTS, PARTS), PARTS)]
    return _chunks(rows, facts.model // PARTS, plan)


def own_expert(facts: Facts) -> Any:
    """The first of the experts whose scores this block finds."""
    return jnp.minimum(lax.axis_index("block"), facts.choice.experts - 1)


def find_scores(
    facts: Facts, plan: Plan, refs: Any, tokens: list[jax.Array], row: list[jax.Array]
) -> None:
    """Send the scores of this block's experts. row: the router's for the first of them."""
    block, experts = lax.axis_index("block"), facts.choice.experts

    def send(expert: Any, row: list[jax.Array]) -> None:
        products = (
            one.astype(jnp.float32) * other.astype(jnp.float32)
            for one, other in zip(tokens, row, strict=True)
        )
        score = _total(sum(products))
        if facts.interpret:
            refs.logits[expert] = score
            return
        start = pl.multiple_of(facts.words("scores") + 2 * expert, 2)
        send_score(refs.state.at[pl.ds(start, 2)], score, refs.round)

    pl.when(block < experts)(lambda: send(block, row))
    if experts > plan.blocks:

        @pl.loop(1, lax.div(experts - block + plan.blocks - 1, jnp.int32(plan.blocks)))
        def _more(turn: Any) -> None:
            expert = block + turn * plan.blocks
            send(expert, router_row(facts, plan, refs, expert))


def take_scores(facts: Facts, refs: Any) -> Any:
    """Where the scores of all experts lie, as soon as all are there: float32 [experts]."""
    if facts.interpret:
        return refs.logits
    experts = facts.choice.experts
    words = refs.state.at[pl.ds(facts.words("scores"), 2 * experts)]
    scores = refs.sums.at[pl.ds(0, experts)]  # between two products' sums
    receive_scores(words, scores, experts, refs.round)
    return scores


def _chunks(rows: Any, width: int, plan: Plan) -> list[jax.Array]:
    layout, columns = layout_of(plan.columns), plan.columns
    return [
        plgpu.load(rows.at[:, pl.ds(first, columns)], layout=layout, optimized=False)
        for first in range(0, width, columns)
    ]


def _total(value: jax.Array) -> jax.Array:
    return value.sum(axis=1).sum(axis=0)  # layouts of both axes at once are not inferred
