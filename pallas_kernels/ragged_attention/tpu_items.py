"""What the TPU kernel does one after another: items, each some query tokens of one row.

A token that is its row's only one is an item of its own; longer spans are cut into blocks. All of
it is computed in the step from the rows, once for all layers.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.pages import RaggedRows

type Leaf = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Items:
    """All int32 [items], the live ones first.

    row: whose block table is read. token: index of the first query token in the flat batch. first:
    its position in the sequence. count: query tokens, 0 for items that are not live. live []: how
    many are.
    """

    row: Leaf
    token: Leaf
    first: Leaf
    count: Leaf
    live: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Place:
    """Where each token's output is found, int32 [tokens]; slot is its number in the item."""

    item: Leaf
    slot: Leaf


def each_token(rows: RaggedRows, tokens: int) -> tuple[Items, Place]:
    """An item for every token: what decode steps are."""
    places = rows.token_places(tokens)
    order = jnp.argsort(~places.valid, stable=True).astype(jnp.int32)
    items = Items(
        row=places.row[order],
        token=order,
        first=places.position[order],
        count=places.valid[order].astype(jnp.int32),
        live=places.valid.sum(dtype=jnp.int32),
    )
    item = jnp.zeros_like(order).at[order].set(jnp.arange(tokens, dtype=jnp.int32))
    return items, Place(item, jnp.zeros_like(item))


def single_tokens(rows: RaggedRows, tokens: int) -> tuple[Items, Place, Bool[Array, " tokens"]]:
    """An item for each row of one token; and for each token whether it is served by them."""
    alone = rows.live_lengths() == 1
    order = jnp.argsort(~alone, stable=True).astype(jnp.int32)
    items = Items(
        row=order,
        token=rows.starts[order],
        first=(rows.kv_lengths - 1)[order],
        count=alone[order].astype(jnp.int32),
        live=alone.sum(dtype=jnp.int32),
    )
    item = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    row = rows.token_places(tokens).row
    return items, Place(item[row], jnp.zeros_like(row)), alone[row]


def most_spans(tokens: int, rows: int, block: int) -> int:
    """Items that `blocks_of_tokens` makes room for."""
    return tokens // block + min(rows, tokens // 2) + 1


def blocks_of_tokens(rows: RaggedRows, tokens: int, block: int) -> tuple[Items, Place]:
    """Spans of more than one token in items of up to `block`."""
    lengths = rows.live_lengths()
    pieces = jnp.where(lengths > 1, -(-lengths // block), 0)
    ends = jnp.cumsum(pieces)
    most = most_spans(tokens, lengths.shape[0], block)
    index = jnp.arange(most, dtype=jnp.int32)
    row = jnp.minimum((index[:, None] >= ends).sum(axis=1), lengths.shape[0] - 1).astype(jnp.int32)
    offset = (index - (ends - pieces)[row]) * block
    live = index < ends[-1]
    start = (rows.kv_lengths - lengths)[row]
    items = Items(
        row=row,
        token=jnp.where(live, rows.starts[row] + offset, 0),
        first=jnp.where(live, start + offset, 0),
        count=jnp.where(live, jnp.minimum(block, lengths[row] - offset), 0).astype(jnp.int32),
        live=ends[-1].astype(jnp.int32),
    )
    places = rows.token_places(tokens)
    within = places.position - (rows.kv_lengths - lengths)[places.row]
    item = (ends - pieces)[places.row] + within // block
    return items, Place(item.astype(jnp.int32), (within % block).astype(jnp.int32))


def gather_queries(
    q: Float[Array, "tokens heads head"], items: Items, block: int, kv_heads: int
) -> Float[Array, "items kv_heads queries head"]:
    """Each item's queries, those of one KV head together: token by token, head by head."""
    tokens, heads, head = q.shape
    index = jnp.minimum(items.token[:, None] + jnp.arange(block, dtype=jnp.int32), tokens - 1)
    found = q[index].reshape(-1, block, kv_heads, heads // kv_heads, head)
    return found.transpose(0, 2, 1, 3, 4).reshape(found.shape[0], kv_heads, -1, head)


def scatter_outputs(
    out: Float[Array, "items kv_heads queries head"], place: Place, block: int
) -> Float[Array, "tokens heads head"]:
    """The inverse of gather_queries."""
    count, kv_heads, _, head = out.shape
    slots = out.reshape(count, kv_heads, block, -1, head).transpose(0, 2, 1, 3, 4)
    slots = slots.reshape(count, block, -1, head)
    return slots[jnp.clip(place.item, 0, count - 1), place.slot]
