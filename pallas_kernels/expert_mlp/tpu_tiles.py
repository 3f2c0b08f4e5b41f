"""The TPU's work lists: tiles of (expert, its rows), made of comparisons and small products alone.

XLA's sorts take seconds to compile for a TPU, its scatters hundreds of cycles an element.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_RUN = 128  # assignments whose order is found by comparing each with each
_DIGIT = 256  # bfloat16 is exact up to here


class Tiles(NamedTuple):
    """expert: of each tile; live: how many tiles there are, the first ones."""

    expert: Int[Array, " tiles"]
    live: Int[Array, ""]


class Places(NamedTuple):
    """place: of the row of a token's expert, 0 if it has none here. token: whose row a place holds,
    0 where it holds none.
    """

    place: Int[Array, "tokens top_k"]
    token: Int[Array, " places"]


def touched_experts(experts: Int[Array, "tokens top_k"], num_experts: int) -> Tiles:
    """A tile for each expert that any token has chosen."""
    chosen = _one_hot(experts, num_experts).any(axis=(0, 1))
    ends = _running_sum(chosen.astype(jnp.int32))
    return Tiles(_find(ends, min(num_experts, experts.size)), ends[-1])


def tiles_of_own_tokens(
    experts: Int[Array, "tokens top_k"], num_experts: int, rows: int
) -> tuple[Tiles, Places]:
    """Each expert's tokens, in their order, in tiles of so many; the last one may have gaps."""
    tokens, top_k = experts.shape
    size = experts.size
    runs = -(-size // _RUN)
    run = jnp.pad(experts.reshape(-1), (0, runs * _RUN - size), constant_values=-1)
    run = run.reshape(runs, _RUN)
    one_hot = _one_hot(run, num_experts)
    earlier = (run[:, :, None] == run[:, None, :]) & jnp.tri(_RUN, k=-1, dtype=jnp.bool)
    counts = one_hot.sum(axis=1, dtype=jnp.int32)
    before = _running_sum(counts) - counts
    each = (before[-1] + counts[-1] + rows - 1) // rows
    ends = _running_sum(each)
    first = (ends - each) * rows + before
    place = jnp.where(one_hot, first[:, None, :], 0).sum(axis=2)
    place = (place + earlier.sum(axis=2, dtype=jnp.int32)).reshape(-1)[:size]
    mine = one_hot.any(axis=2).reshape(-1)[:size]
    most = size // rows + min(num_experts, size)
    token = _owners(jnp.where(mine, place, most * rows), top_k, most, rows)
    place = jnp.where(mine, place, 0).reshape(tokens, top_k)
    return Tiles(_find(ends, most), ends[-1]), Places(place, token)


def known(experts: Int[Array, "tokens top_k"], num_experts: int) -> Bool[Array, "tokens top_k"]:
    """Which of a token's experts are here."""
    return (experts >= 0) & (experts < num_experts)


def _owners(
    place: Int[Array, " assignments"], top_k: int, tiles: int, rows: int
) -> Int[Array, " places"]:
    """The token of each place: a scatter written as a product, since no two share a place."""
    token = jnp.arange(place.shape[0], dtype=jnp.int32) // top_k
    there = place // rows == jnp.arange(tiles, dtype=jnp.int32)[:, None]
    digits = [jnp.where(there, digit, 0) for digit in divmod(token, _DIGIT)]
    high, low = jax.lax.dot(
        jnp.concatenate(digits).astype(jnp.bfloat16),
        _one_hot(place % rows, rows).astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    ).reshape(2, -1)
    return (high * _DIGIT + low).astype(jnp.int32)


def _one_hot(values: Int[Array, "..."], count: int) -> Bool[Array, "... count"]:
    return values[..., None] == jnp.arange(count, dtype=jnp.int32)


def _running_sum(values: Int[Array, "..."]) -> Int[Array, "..."]:
    """Inclusive, along the first axis. Exact: what is counted here stays far below 2**24."""
    summed = jax.lax.dot(
        jnp.tri(values.shape[0], dtype=jnp.float32),
        values.reshape(values.shape[0], -1).astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return summed.astype(jnp.int32).reshape(values.shape)


def _find(ends: Int[Array, " experts"], most: int) -> Int[Array, " tiles"]:
    """The expert of each tile; the last one for tiles past the end."""
    tile = jnp.arange(most, dtype=jnp.int32)
    return (tile[:, None] >= ends[:-1]).sum(axis=1, dtype=jnp.int32)
