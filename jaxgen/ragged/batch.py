"""A step's metadata: packed on the host into one int32 vector, taken apart again inside jit.

One vector is one transfer. Padding tokens belong to no row; padding rows and blocks that a row does
not own hold an id just past the pool, so that nothing can map to a live block.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgen.ragged.buckets import Bucket
from jaxgen.ragged.rows import StepRows
from jaxgen.ragged.sequence import Sequence
from jaxgen.ragged.state import StateManager
from pallas_kernels.pages import RaggedRows

LAST_SAMPLED = -1
"""The token id that stands for what the sampler gave the row's slot last; the device knows it."""

_ALIGNMENT = 64
"""Integers: 256 bytes."""

_PER_ROW = ("starts", "query_lengths", "kv_lengths", "anchors", "slots", "emit", "last_index")

type Int32 = Any
"""An int32 array: numpy's outside jit, a tracer inside."""


class BatchItem(NamedTuple):
    """One row of a step: a sequence whose tokens are reserved, those token ids, and its end.

    tokens: as many as the sequence has in flight; LAST_SAMPLED for one that the host does not know.
    emit: the row's last token is followed by a sampled one.
    """

    sequence: Sequence
    tokens: Items[int] | np.ndarray
    emit: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the jitted step sees of a batch.

    token_ids: int32 [tokens]; LAST_SAMPLED where the row's slot has it; 0 for padding.
    rows: one RaggedRows for each cache group; they differ in their block tables alone.
    anchors: int32 [rows], the length of the sequence's prompt; 0 for padding rows.
    slots: int32 [rows], the row in the sampler's state. Rows that do not sample, padding included,
        may have the number of slots, which is out of range: updates there are dropped.
    emit: bool [rows], whether the row samples a token.
    last_index: int32 [rows], the row's last token in the flat batch; 0 for padding rows.
    """

    token_ids: Int32
    rows: tuple[RaggedRows, ...]
    anchors: Int32
    slots: Int32
    emit: Any
    last_index: Int32


def packed_size(bucket: Bucket, groups: int) -> int:
    """Length of the packed vector for a bucket and a number of cache groups."""
    return sum(_aligned(size) for size in _sizes(bucket, groups).values())


def pack(
    bucket: Bucket, items: Items[BatchItem], state: StateManager, *, row_alignment: int = 1
) -> np.ndarray:
    """As `pack_rows`, for rows that are given one by one."""
    rows = StepRows(
        indices=[item.sequence.index for item in items],
        counts=[len(item.tokens) for item in items],
        token_ids=list(chain.from_iterable(item.tokens for item in items)),
        emit=[item.emit for item in items],
    )
    return pack_rows(bucket, rows, state, row_alignment=row_alignment)


def pack_rows(
    bucket: Bucket, rows: StepRows, state: StateManager, *, row_alignment: int = 1
) -> np.ndarray:
    """int32 [packed_size] of a batch whose tokens are reserved in `state` and not yet committed.

    row_alignment: row spans begin at multiples of it. ValueError if the batch does not fit the
    bucket, or a row's tokens are not those in flight.
    """
    live, arrays = len(rows.indices), state.arrays
    indices = np.asarray(rows.indices, np.intp)
    counts = np.asarray(rows.counts, np.int32)
    spans = -(-counts // row_alignment) * row_alignment
    _check_fit(bucket, indices, counts, int(spans.sum()), state)
    starts = np.cumsum(spans, dtype=np.int32) - spans

    packed = np.zeros(packed_size(bucket, len(state.groups)), np.int32)
    parts = _split(packed, bucket, len(state.groups))
    token_ids = np.asarray(rows.token_ids, np.int32)
    if row_alignment == 1:
        parts["token_ids"][: token_ids.size] = token_ids
    else:
        shift = starts - (np.cumsum(counts) - counts)
        parts["token_ids"][np.arange(token_ids.size) + np.repeat(shift, counts)] = token_ids

    # Padding rows begin behind the last token, so that starts never decrease.
    parts["starts"][live:] = bucket.tokens
    parts["starts"][:live] = starts
    parts["query_lengths"][:live] = counts
    parts["kv_lengths"][:live] = arrays.seen[indices] + arrays.in_flight[indices]
    parts["anchors"][:live] = arrays.anchors[indices]
    parts["slots"][live:] = state.num_slots
    parts["slots"][:live] = arrays.slots[indices]
    parts["emit"][:live] = rows.emit
    parts["last_index"][:live] = starts + counts - 1
    parts["num_rows"][:] = live
    for group, table in enumerate(state.tables):
        target = parts[f"block_table{group}"].reshape(bucket.rows, bucket.blocks)
        target[live:] = state.num_blocks[group]
        # Indexing would make a copy of its own first, and tables of long contexts have megabytes.
        np.take(table[:, : bucket.blocks], indices, axis=0, out=target[:live], mode="clip")
    return packed


def unpack(packed: Int32, bucket: Bucket, groups: int) -> StepBatch:
    """The batch in a packed vector, numpy or jax, inside jit or out; slices and reshapes only."""
    parts = _split(packed, bucket, groups)
    rows = tuple(
        RaggedRows(
            starts=parts["starts"],
            query_lengths=parts["query_lengths"],
            kv_lengths=parts["kv_lengths"],
            block_table=parts[f"block_table{group}"].reshape(bucket.rows, bucket.blocks),
            num_rows=parts["num_rows"].reshape(()),
        )
        for group in range(groups)
    )
    return StepBatch(
        token_ids=parts["token_ids"],
        rows=rows,
        anchors=parts["anchors"],
        slots=parts["slots"],
        emit=parts["emit"] != 0,
        last_index=parts["last_index"],
    )


def _split(packed: Int32, bucket: Bucket, groups: int) -> dict[str, Int32]:
    """The named parts of a packed vector, as views where numpy is."""
    parts, begin = {}, 0
    for name, size in _sizes(bucket, groups).items():
        parts[name] = packed[begin : begin + size]
        begin += _aligned(size)
    return parts


def _sizes(bucket: Bucket, groups: int) -> dict[str, int]:
    sizes = {"token_ids": bucket.tokens, **dict.fromkeys(_PER_ROW, bucket.rows), "num_rows": 1}
    return sizes | {f"block_table{g}": bucket.rows * bucket.blocks for g in range(groups)}


def _aligned(size: int) -> int:
    """XLA hands a slice to a kernel as a view, and GPU kernels need theirs 256-byte aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _check_fit(
    bucket: Bucket, indices: np.ndarray, counts: np.ndarray, tokens: int, state: StateManager
) -> None:
    if indices.size > bucket.rows or tokens > bucket.tokens:
        raise ValueError(f"{indices.size} rows with {tokens} tokens do not fit {bucket}.")
    if bucket.decode and (counts != 1).any():
        raise ValueError(f"A decode bucket takes rows of one token, got {counts.tolist()}.")
    in_flight = state.arrays.in_flight[indices]
    wrong = np.flatnonzero((counts != in_flight) | (in_flight == 0))
    if wrong.size:
        row = wrong[0]
        raise ValueError(
            f"Row {row} has {in_flight[row]} tokens in flight, the batch brings {counts[row]}: "
            "reserve them before packing, commit after."
        )
    widest = int(state.arrays.end_blocks[indices].max(initial=0))
    if widest > bucket.blocks:
        raise ValueError(f"A row has {widest} blocks, too many for {bucket}.")
