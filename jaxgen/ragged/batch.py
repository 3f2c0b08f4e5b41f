"""A step's metadata: packed on the host into one int32 vector, taken apart again inside jit.

One vector is one transfer. Padding tokens belong to no row; padding rows and blocks that a row does
not own hold an id just past the pool, so that nothing can map to a live block.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
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
    return _layout(bucket, groups)[1]


def pack(
    bucket: Bucket, items: Items[BatchItem], state: StateManager, *, row_alignment: int = 1
) -> np.ndarray:
    """As `pack_rows`, for rows that are given one by one."""
    rows = StepRows(
        indices=np.array([item.sequence.index for item in items], np.intp),
        counts=np.array([len(item.tokens) for item in items], np.int32),
        token_ids=np.array([*chain.from_iterable(item.tokens for item in items)], np.int32),
        emit=np.array([item.emit for item in items], bool),
    )
    return pack_rows(bucket, rows, state, row_alignment=row_alignment)


def pack_rows(
    bucket: Bucket, rows: StepRows, state: StateManager, *, row_alignment: int = 1
) -> np.ndarray:
    """int32 [packed_size] of a batch whose tokens are reserved in `state` and not yet committed.

    row_alignment: row spans begin at multiples of it. ValueError if the batch does not fit the
    bucket, or a row's tokens are not those in flight.
    """
    indices, counts, token_ids, emit = rows
    live = indices.size
    seen, in_flight, anchors, slots, ends = state.arrays.gather(indices)
    spans = counts if row_alignment == 1 else -(-counts // row_alignment) * row_alignment
    starts = spans.cumsum(dtype=np.int32) - spans
    _check_fit(bucket, counts, in_flight, tokens=int(spans.sum()), widest=int(ends.max(initial=0)))

    packed = np.zeros(packed_size(bucket, len(state.groups)), np.int32)
    parts = _split(packed, bucket, len(state.groups))
    if row_alignment == 1:
        parts["token_ids"][: token_ids.size] = token_ids
    else:
        shift = starts - (np.cumsum(counts) - counts)
        parts["token_ids"][np.arange(token_ids.size) + np.repeat(shift, counts)] = token_ids

    # Padding rows begin behind the last token, so that starts never decrease.
    parts["starts"][live:] = bucket.tokens
    parts["starts"][:live] = starts
    parts["query_lengths"][:live] = counts
    parts["kv_lengths"][:live] = seen + in_flight
    parts["anchors"][:live] = anchors
    parts["slots"][live:] = state.num_slots
    parts["slots"][:live] = slots
    parts["emit"][:live] = emit
    parts["last_index"][:live] = starts + counts - 1
    parts["num_rows"][:] = live
    for group, table in enumerate(state.tables):
        target = parts[f"block_table{group}"].reshape(bucket.rows, bucket.blocks)
        target[live:] = state.num_blocks[group]
        if bucket.blocks == table.shape[1]:
            # Indexing would make a copy of its own first, and such tables may have megabytes.
            table.take(indices, axis=0, out=target[:live], mode="clip")
        else:  # `take` would first make a copy of that part of all rows
            target[:live] = table[indices, : bucket.blocks]
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
    return {name: packed[part] for name, part in _layout(bucket, groups)[0].items()}


@cache
def _layout(bucket: Bucket, groups: int) -> tuple[dict[str, slice], int]:
    """Where each part lies in the packed vector, and how long that is."""
    sizes = {"token_ids": bucket.tokens, **dict.fromkeys(_PER_ROW, bucket.rows), "num_rows": 1}
    sizes |= {f"block_table{g}": bucket.rows * bucket.blocks for g in range(groups)}
    parts, begin = {}, 0
    for name, size in sizes.items():
        parts[name] = slice(begin, begin + size)
        begin += _aligned(size)
    return parts, begin


def _aligned(size: int) -> int:
    """XLA hands a slice to a kernel as a view, and GPU kernels need theirs 256-byte aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _check_fit(
    bucket: Bucket, counts: np.ndarray, in_flight: np.ndarray, *, tokens: int, widest: int
) -> None:
    if counts.size > bucket.rows or tokens > bucket.tokens:
        raise ValueError(f"{counts.size} rows with {tokens} tokens do not fit {bucket}.")
    if bucket.decode and (counts != 1).any():
        raise ValueError(f"A decode bucket takes rows of one token, got {counts.tolist()}.")
    wrong = (counts != in_flight) | (in_flight == 0)
    if wrong.any():
        row = wrong.argmax()
        raise ValueError(
            f"Row {row} has {in_flight[row]} tokens in flight, the batch brings {counts[row]}: "
            "reserve them before packing, commit after."
        )
    if widest > bucket.blocks:
        raise ValueError(f"A row has {widest} blocks, too many for {bucket}.")
