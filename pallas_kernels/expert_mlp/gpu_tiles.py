"""The work list of the experts' blocks: tiles of (expert, a few of its rows), without any sort.

A tile's results lie in places of its own, `columns` of them, so that tiles never share one. Where
an expert has several tiles, some of them are a run, which reads the expert's weights once for all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_PAIRS = 2048  # assignments whose order is found by comparing each with each: 4M comparisons
_SOME = 128  # of more than those, so many are compared with each other


class Runs(NamedTuple):
    """Tiles of one expert that lie side by side, `together` of them or what is left.

    Run i is of expert[i] and begins with tile offset[i] + i * together; that expert's tiles end
    before tile end[i]. ends: the last one is the number of live runs.
    """

    expert: Int[Array, " runs"]
    offset: Int[Array, " runs"]
    end: Int[Array, " runs"]
    ends: Int[Array, " ends"]


class Tiles(NamedTuple):
    """expert: of each tile; ends: the last one is the number of live tiles.

    place: where the results of a token's expert are, which says nothing where `mine` is False:
    there is no such expert here. token: whose row a place holds, nobody's where the rows lie there
    already; None where every tile holds all tokens. runs: None where every tile is one.
    """

    expert: Int[Array, " tiles"]
    ends: Int[Array, " ends"]
    place: Int[Array, "tokens top_k"]
    mine: Bool[Array, "tokens top_k"]
    token: Int[Array, " places"] | None
    runs: Runs | None = None


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
    experts: Int[Array, "tokens top_k"], num_experts: int, columns: int, together: int = 1
) -> Tiles:
    """Each expert's tokens, in their order, in tiles of `columns`; the last one may have gaps.

    together: tiles of a run at most. Behind the last tile are as many places as let a run of fewer
    be read as one of that many.
    """
    tokens, top_k = experts.shape
    rank, sizes = _ranks(experts.reshape(-1), num_experts)
    each = (sizes + columns - 1) // columns
    ends = _running_sum(each)
    runs = None if together == 1 else _runs(each, experts.size // columns, together)
    most = experts.size // columns + min(num_experts, experts.size)
    first = (ends - each).at[experts].get(mode="clip") * columns
    place = first + rank.reshape(tokens, top_k)
    mine = _within(experts, num_experts)
    token = jnp.arange(experts.size, dtype=jnp.int32) // top_k
    where = jnp.where(mine, place, (most + together) * columns).reshape(-1)
    places = (most + together - 1) * columns
    owner = jnp.zeros(places, jnp.int32).at[where].set(token, mode="drop")
    return Tiles(
        expert=_find(ends, most),
        ends=ends,
        place=jnp.where(mine, place, 0),
        mine=mine,
        token=owner,
        runs=runs,
    )


def _runs(each: Int[Array, " experts"], whole: int, together: int) -> Runs:
    """each: tiles of every expert; whole: full tiles there can be in all."""
    runs = (each + together - 1) // together
    ends = _running_sum(runs)
    number = jnp.arange(whole // together + each.shape[0], dtype=jnp.int32)[:, None]
    behind, begun = number >= ends, number >= ends - runs  # experts whose runs have ended, begun
    behind = behind & (jnp.arange(each.shape[0]) < each.shape[0] - 1)  # the last runs never do

    def total(which: Bool[Array, "runs experts"], values: Any) -> Int[Array, " runs"]:
        return jnp.where(which, values, 0).sum(axis=1, dtype=jnp.int32)

    # Sums of one shape, without anything after them: one kernel.
    return Runs(
        expert=total(behind, 1),
        offset=total(behind, each - runs * together),
        end=total(begun, each),
        ends=ends,
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
    some = size if size <= _PAIRS else _SOME
    parts = -(-size // some)
    part = jnp.pad(expert, (0, parts * some - size), constant_values=-1).reshape(parts, some)
    same = (part[:, :, None] == part[:, None, :]) & jnp.tri(some, k=-1, dtype=jnp.bool)
    within = same.sum(axis=2, dtype=jnp.int32)
    numbers = jnp.arange(num_experts, dtype=jnp.int32)[:, None]
    counts = (part[:, None, :] == numbers).sum(axis=2, dtype=jnp.int32)
    if parts == 1:
        return within[0], counts[0]
    # Exact: counts of assignments are far below 2**24.
    before = jax.lax.dot(
        jnp.tri(parts, k=-1, dtype=jnp.float32),
        counts.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    ).astype(jnp.int32)
    ahead = jnp.take_along_axis(before, jnp.clip(part, 0, num_experts - 1), axis=1)
    return (within + ahead).reshape(-1)[:size], before[-1] + counts[-1]
