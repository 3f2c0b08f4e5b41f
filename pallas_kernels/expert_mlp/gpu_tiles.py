"""The work list of the experts' blocks: tiles of (expert, a few of its rows), without any sort.

A tile's results lie in places of its own, `columns` of them, so that tiles never share one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_RUN = 128  # assignments whose order is found by comparing each with each


class Tiles(NamedTuple):
    """expert: of each tile; ends: the last one is the number of live tiles.

    place: where the results of a token's expert are, which says nothing where `mine` is False:
    there is no such expert here. token: whose row a place holds, nobody's where the rows lie there
    already; None where every tile holds all tokens.
    """

    expert: Int[Array, " tiles"]
    ends: Int[Array, " ends"]
    place: Int[Array, "tokens top_k"]
    mine: Bool[Array, "tokens top_k"]
    token: Int[Array, " places"] | None


def tiles_of_all_tokens(
    experts: Int[Array, "tokens top_k"], num_experts: int, columns: int
) -> Tiles:
    """One tile for each expert that any token has chosen; all tokens are its rows."""
    chosen = _one_hot(experts, num_experts).any(axis=(0, 1))
    ends = _running_sum(chosen.astype(jnp.int32))
    most = min(num_experts, experts.size)
    token = jnp.arange(experts.shape[0], dtype=jnp.int32)[:, None]
    tile = jnp.clip(ends.at[experts].get(mode="clip") - 1, 0)
    return Tiles(
        expert=_find(ends, most),
        ends=ends,
        place=tile * columns + token,
        mine=_within(experts, num_experts),
        token=None,
    )


def tiles_of_one_token(experts: Int[Array, "1 top_k"], num_experts: int, columns: int) -> Tiles:
    """A tile for each choice, as they differ. One that is none costs as much as some expert."""
    top_k = experts.shape[1]
    return Tiles(
        expert=experts[0],
        ends=jnp.full(1, top_k, jnp.int32),
        place=jnp.arange(top_k, dtype=jnp.int32)[None] * columns,
        mine=_within(experts, num_experts),
        token=None,
    )


def tiles_of_sorted_tokens(
    experts: Int[Array, "tokens top_k"], num_experts: int, columns: int
) -> Tiles:
    """Each expert's tokens, in their order, in tiles of `columns`; the last one may have gaps."""
    tokens, top_k = experts.shape
    rank, sizes = _ranks(experts.reshape(-1), num_experts)
    each = (sizes + columns - 1) // columns
    ends = _running_sum(each)
    most = experts.size // columns + min(num_experts, experts.size)
    first = (ends - each).at[experts].get(mode="clip") * columns
    place = first + rank.reshape(tokens, top_k)
    mine = _within(experts, num_experts)
    token = jnp.arange(experts.size, dtype=jnp.int32) // top_k
    where = jnp.where(mine, place, most * columns).reshape(-1)
    owner = jnp.zeros(most * columns, jnp.int32).at[where].set(token, mode="drop")
    return Tiles(
        expert=_find(ends, most),
        ends=ends,
        place=jnp.where(mine, place, 0),
        mine=mine,
        token=owner,
    )


def _within(experts: Int[Array, "tokens top_k"], num_experts: int) -> Bool[Array, "tokens top_k"]:
    return (experts >= 0) & (experts < num_experts)


def _one_hot(experts: Int[Array, "..."], num_experts: int) -> Bool[Array, "... experts"]:
    return experts[..., None] == jnp.arange(num_experts, dtype=jnp.int32)


def _running_sum(values: Int[Array, " n"]) -> Int[Array, " n"]:
    """Inclusive; as one masked sum, which is one small kernel where jnp.cumsum is several."""
    n = values.shape[0]
    return jnp.where(jnp.tri(n, dtype=jnp.bool), values, 0).sum(axis=1, dtype=jnp.int32)


def _find(ends: Int[Array, " experts"], most: int) -> Int[Array, " tiles"]:
    """The expert of each tile; the last one for tiles past the end."""
    tile = jnp.arange(most, dtype=jnp.int32)
    return (tile[:, None] >= ends[:-1]).sum(axis=1, dtype=jnp.int32)


def _ranks(
    expert: Int[Array, " assignments"], num_experts: int
) -> tuple[Int[Array, " assignments"], Int[Array, " experts"]]:
    """How many earlier assignments go to the same expert, and how many go to each in all."""
    size = expert.shape[0]
    runs = -(-size // _RUN)
    run = jnp.pad(expert, (0, runs * _RUN - size), constant_values=-1).reshape(runs, _RUN)
    same = (run[:, :, None] == run[:, None, :]) & jnp.tri(_RUN, k=-1, dtype=jnp.bool)
    within = same.sum(axis=2, dtype=jnp.int32)
    per_run = _one_hot(run, num_experts).sum(axis=1, dtype=jnp.int32)
    if runs == 1:
        return within.reshape(-1)[:size], per_run[0]
    # Exact: counts of assignments are far below 2**24.
    before = jax.lax.dot(
        jnp.tri(runs, k=-1, dtype=jnp.float32),
        per_run.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    ).astype(jnp.int32)
    ahead = jnp.take_along_axis(before, jnp.clip(run, 0, num_experts - 1), axis=1)
    return (within + ahead).reshape(-1)[:size], before[-1] + per_run[-1]
