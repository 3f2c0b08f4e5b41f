"""The work list of ragged prefill: tiles of query tokens, longest first, dealt out like cards.

A tile is a few consecutive query tokens of one row with all query heads of one KV head. Dealing
back and forth over the SMs in order of length gives each nearly the same number of KV blocks.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.pages import RaggedRows

START, COUNT, ROW, POSITION, LENGTH, FIRST, END, HEAD = range(8)


class Tiles(NamedTuple):
    """tiles [most, 8], in order of dealing; the columns of `Tile` without its head.

    counts [2]: tiles that are live, and padding tokens. padding [tokens]: those tokens first.
    """

    tiles: Int[Array, "tiles 8"]
    counts: Int[Array, " 2"]
    padding: Int[Array, " tokens"]


class Tile(NamedTuple):
    """One tile as a kernel sees it, all scalars.

    start: its first token in the batch; count: its tokens; row; position: of the first token;
    length: KV tokens of the row; first, end: KV blocks to visit; head: KV head.
    """

    start: Any
    count: Any
    row: Any
    position: Any
    length: Any
    first: Any
    end: Any
    head: Any


def make_tiles(
    rows: RaggedRows,
    tokens: int,
    *,
    per_tile: int,
    block: int,
    window: int | None,
    longer_than: int = 0,
) -> Tiles:
    """Cut the query tokens of every row that has more than longer_than into tiles of at most
    per_tile.
    """
    lengths = rows.live_lengths()
    lengths = jnp.where(lengths > longer_than, lengths, 0)
    each = (lengths + per_tile - 1) // per_tile
    ends = jnp.cumsum(each)
    most = tokens // per_tile + min(rows.starts.shape[0], tokens)
    tile = jnp.arange(most, dtype=jnp.int32)
    row = (tile[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
    live = tile < ends[-1]
    row = jnp.where(live, row, 0)
    offset = (tile - ends[row] + each[row]) * per_tile
    count = jnp.where(live, jnp.minimum(lengths[row] - offset, per_tile), 0)
    position = (rows.kv_lengths - rows.query_lengths)[row] + offset
    end = jnp.where(live, (position + count + block - 1) // block, 0)
    first = jnp.zeros_like(end)
    if window is not None:
        first = jnp.where(live, jnp.maximum(position - window + 1, 0) // block, 0)
    start = rows.starts[row] + offset
    columns = [start, count, row, position, rows.kv_lengths[row], first, end, end]
    order = jnp.argsort(-(end - first), stable=True)

    valid = rows.token_places(tokens).valid
    padding = jnp.argsort(valid, stable=True).astype(jnp.int32)
    counts = jnp.stack([ends[-1], tokens - valid.sum(dtype=jnp.int32)])
    return Tiles(
        tiles=jnp.stack(columns, axis=1)[order], counts=counts.astype(jnp.int32), padding=padding
    )


def deal(tiles: Any, counts: Any, dealer: Any, hands: int, kv_heads: int, visit: Any) -> Any:
    """Call visit(tile, turn, done) for every tile of one SM's hand, in turns 0, 1, 2...

    done: KV blocks visited before. Returns the blocks of the whole hand.
    """
    total = counts[0] * kv_heads

    def step(turn: Any, done: Any) -> Any:
        forth = lax.rem(turn, jnp.int32(2)) == 0
        rank = turn * hands + jnp.where(forth, dealer, hands - 1 - dealer)
        index = jnp.minimum(lax.div(rank, jnp.int32(kv_heads)), tiles.shape[0] - 1)
        end = tiles[index, END]
        first = tiles[index, FIRST]
        dealt = rank < total

        @pl.when(dealt)
        def _visit() -> None:
            columns = (tiles[index, column] for column in (START, COUNT, ROW, POSITION, LENGTH))
            visit(Tile(*columns, first, end, lax.rem(rank, jnp.int32(kv_heads))), turn, done)

        return done + jnp.where(dealt, end - first, 0)

    return lax.fori_loop(0, (total + hands - 1) // hands, step, jnp.int32(0))
