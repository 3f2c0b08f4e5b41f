"""The pytrees that attention eats: one layer's KV pages and the ragged rows of a step.

The layout of a page is known here alone: others allocate, write and read pages through this module.
On TPU rows are packed, since its memory comes in lanes of 128.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import target_platform

LANES = 128
"""Elements that a TPU stores together: narrower rows take as much room."""

type Leaf = Any
"""An array, or what stands for one in the same tree: ShapeDtypeStruct, PartitionSpec, sharding."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where each token of the flat batch belongs: its row, and its position in that sequence.

    All three are [tokens]; padding tokens have row 0, position 0 and valid False.
    """

    row: Leaf
    position: Leaf
    valid: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Which span of the flat token axis belongs to which sequence, and where its KV lies.

    All int32. starts [rows]: index of the row's first token. query_lengths [rows]: its tokens in
    this step. kv_lengths [rows]: its tokens in all, this step's included. block_table
    [rows, blocks]: page of each block of the sequence, counted from its first token; entries that
    the row does not own are never used. num_rows []: the live rows, which come first. Spans do not
    overlap; there may be padding tokens between them.

    Example: a prompt of 3 tokens and a sequence that decodes its 8th token, in a bucket of 4 tokens
    and 3 rows with pages of 4: starts [0, 3, 0], query_lengths [3, 1, 0], kv_lengths [3, 8, 0],
    block_table [[7, 0], [2, 5], [0, 0]], num_rows 2.
    """

    starts: Leaf
    query_lengths: Leaf
    kv_lengths: Leaf
    block_table: Leaf
    num_rows: Leaf

    def live_lengths(self) -> Int[Array, " rows"]:
        """Query tokens of each row, 0 for padding rows."""
        live = jnp.arange(self.starts.shape[0], dtype=jnp.int32) < self.num_rows
        return jnp.where(live, self.query_lengths, 0)

    def token_places(self, num_tokens: int) -> TokenPlaces:
        """Row, position in the sequence and validity of each of the bucket's num_tokens tokens."""
        token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
        inside = (token >= self.starts) & (token < self.starts + self.live_lengths())
        row = jnp.argmax(inside, axis=1).astype(jnp.int32)
        valid = inside.any(axis=1)
        first = self.kv_lengths - self.query_lengths - self.starts
        position = jnp.where(valid, token[:, 0] + first[row], 0)
        return TokenPlaces(row=row, position=position, valid=valid)

    def token_slots(
        self, num_tokens: int, *, page_size: int, num_pages: int
    ) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
        """Page and place in it of each token of this step.

        Padding goes to pages past the end, each to its own, so that all indices stay unique.
        """
        places = self.token_places(num_tokens)
        page = self.block_table[places.row, places.position // page_size]
        nowhere = num_pages + jnp.arange(num_tokens, dtype=jnp.int32)
        return jnp.where(places.valid, page, nowhere), places.position % page_size


def whole_lanes(width: int) -> int:
    """The width in whole lanes of TPU memory."""
    return -(-width // LANES) * LANES


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One head of one token on TPU: its key from lane 0 on, its value from lane `value` on.

    lanes: of the whole row. What lies between and behind is zero. A copy brings both at once, and
    heads of 64 waste nothing.
    """

    value: int
    lanes: int

    @classmethod
    def of(cls, head_dim: int) -> "PackedRow":
        """Side by side where that saves lanes, else each in lanes of its own."""
        dense, apart = whole_lanes(2 * head_dim), 2 * whole_lanes(head_dim)
        return cls(head_dim, dense) if dense < apart else cls(apart // 2, apart)

    def join(
        self, keys: Float[Array, "*rows head"], values: Float[Array, "*rows head"]
    ) -> Float[Array, "*rows lanes"]:
        """Rows of keys and their values."""
        head_dim = keys.shape[-1]
        around = ((0, 0),) * (keys.ndim - 1)
        keys = jnp.pad(keys, (*around, (0, self.value - head_dim)))
        values = jnp.pad(values, (*around, (0, self.lanes - self.value - head_dim)))
        return jnp.concatenate([keys, values], axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's keys and values, in pages of a fixed number of tokens.

    Both are [pages, kv_heads, page, head]: what one head reads of a page is contiguous. Or, packed,
    keys are rows of both, [pages, kv_heads, page, lanes], and values have no page at all: they
    still tell how wide a head is.
    """

    keys: Leaf
    values: Leaf

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        """KV heads, of this shard when called under shard_map."""
        return self.keys.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of one page."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.values.shape[3]

    @property
    def packed(self) -> bool:
        """Whether keys and values lie together, as on TPU."""
        return self.values.shape[0] == 0

    @property
    def row(self) -> PackedRow:
        """Where key and value are in a row of packed pages."""
        return PackedRow.of(self.head_dim)

    def write(
        self,
        k_new: Float[Array, "tokens kv_heads head"],
        v_new: Float[Array, "tokens kv_heads head"],
        rows: RaggedRows,
    ) -> "KVPages":
        """Pages with the step's tokens in place; in place when donated. Padding touches nothing."""
        page, offset = rows.token_slots(
            k_new.shape[0], page_size=self.page_size, num_pages=self.num_pages
        )

        def put(pool: Array, new: Array) -> Array:
            slots = pool.at[page, :, offset]
            return slots.set(new.astype(pool.dtype), mode="drop", unique_indices=True)

        if self.packed:
            return KVPages(keys=put(self.keys, self.row.join(k_new, v_new)), values=self.values)
        return KVPages(keys=put(self.keys, k_new), values=put(self.values, v_new))

    def read(
        self, blocks: Int[Array, "*batch blocks"]
    ) -> tuple[Float[Array, "*batch kv_heads kv head"], Float[Array, "*batch kv_heads kv head"]]:
        """Keys and values of the given pages one after another, kv = blocks * page.

        Page ids outside the pool give some page's content: the caller masks it.
        """

        def take(pool: Array) -> Array:
            found = pool.at[blocks].get(mode="clip")
            found = jnp.moveaxis(found, -4, -3)
            return found.reshape(*found.shape[:-3], -1, pool.shape[-1])

        if self.packed:
            found, value = take(self.keys), self.row.value
            return found[..., : self.head_dim], found[..., value : value + self.head_dim]
        return take(self.keys), take(self.values)


def _page_shapes(
    num_pages: int, page_size: int, kv_heads: int, head_dim: int, platform: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = {
        "num_pages": num_pages,
        "page_size": page_size,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
    heads = (kv_heads, page_size)
    if platform == "tpu":
        return (num_pages, *heads, PackedRow.of(head_dim).lanes), (0, *heads, head_dim)
    return (num_pages, *heads, head_dim), (num_pages, *heads, head_dim)


def abstract_kv_pages(
    num_pages: int,
    *,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    platform: str | None = None,
    sharding: KVPages | None = None,
) -> KVPages:
    """KVPages of jax.ShapeDtypeStruct, with the shardings of a KVPages of shardings if given.

    platform: the platform whose layout is wanted ("cpu", "cuda", "tpu"; None: the one that is
    traced for). Those of TPU are packed.
    """
    keys, values = _page_shapes(
        num_pages, page_size, kv_heads, head_dim, platform or target_platform()
    )
    placed = KVPages(None, None) if sharding is None else sharding
    return KVPages(
        keys=jax.ShapeDtypeStruct(keys, dtype, sharding=placed.keys),
        values=jax.ShapeDtypeStruct(values, dtype, sharding=placed.values),
    )


def kv_pages(
    num_pages: int,
    *,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    platform: str | None = None,
) -> KVPages:
    """One layer's pages, all zeros; arguments as in abstract_kv_pages."""
    abstract = abstract_kv_pages(
        num_pages,
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        platform=platform,
    )
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)


def kv_page_bytes(
    *,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    platform: str | None = None,
) -> int:
    """Bytes of one page of one layer, keys and values together."""
    one = abstract_kv_pages(
        1,
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        platform=platform,
    )
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))


def kv_pages_spec(axis_name: str | None) -> KVPages:
    """KVPages of PartitionSpec: KV heads over that mesh axis, everything else replicated."""
    spec = PartitionSpec(None, axis_name, None, None)
    return KVPages(keys=spec, values=spec)
