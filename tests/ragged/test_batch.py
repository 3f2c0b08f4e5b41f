"""Buckets fit every admissible batch closely; unpacking undoes packing; padding is apart."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen.ragged.batch import LAST_SAMPLED, BatchItem, pack, packed_size, unpack
from jaxgen.ragged.buckets import SMALLEST_MIXED, Bucket, Buckets, NoBucket
from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import StateManager


def manager(max_tracked=40, windows=(None, 5)):
    return StateManager(
        [CacheGroup(window) for window in windows],
        [700 + group for group in range(len(windows))],
        block_size=4,
        max_context=600,
        max_tracked=max_tracked,
        num_slots=max_tracked,
    )


@st.composite
def admissible(draw):
    max_rows = draw(st.integers(1, 40))
    max_tokens = max_rows + draw(st.integers(0, 300))
    alignment = draw(st.sampled_from([1, 8]))
    counts, left = [], max_tokens
    for remaining_rows in range(draw(st.integers(1, max_rows)), 0, -1):
        if draw(st.booleans()):
            counts.append(1)
        else:
            counts.append(draw(st.integers(1, max(1, left - remaining_rows + 1))))
        left -= counts[-1]
    return max_tokens, max_rows, alignment, counts


@settings(deadline=None, max_examples=300)
@given(admissible())
def test_every_admissible_batch_has_a_close_bucket(case):
    max_tokens, max_rows, alignment, counts = case
    assert sum(counts) <= max_tokens
    buckets = Buckets.for_limits(
        max_tokens=max_tokens, max_rows=max_rows, max_blocks=3, row_alignment=alignment
    )
    bucket = buckets.fit(counts)
    needed = sum(-(-count // alignment) * alignment for count in counts)
    assert bucket in list(buckets)
    assert bucket.tokens % alignment == 0
    assert bucket.rows >= len(counts)
    assert bucket.tokens >= needed
    if bucket.decode:
        assert max(counts) == 1
        assert bucket.tokens == bucket.rows * alignment
        assert bucket.rows < 2 * len(counts)
    else:
        assert bucket.tokens < 2 * needed or bucket.tokens <= SMALLEST_MIXED
        assert bucket.rows in (8, max_rows) or bucket.rows == bucket.tokens // alignment


def test_the_shapes_are_few():
    buckets = Buckets.for_limits(max_tokens=2048, max_rows=256, max_blocks=8)
    assert [bucket.rows for bucket in buckets.decode] == [
        *(1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
    ]
    assert buckets.filled == (256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
    many = Buckets.for_limits(max_tokens=2048, max_rows=1000, max_blocks=8)
    assert [bucket.rows for bucket in many.decode][10:] == [256, 384, 512, 768, 1000]
    assert len(list(buckets)) <= 30
    assert len({*buckets}) == len(list(buckets))
    assert buckets.fit([]).rows == 1
    assert {bucket.blocks for bucket in buckets} == {8}
    with pytest.raises(NoBucket, match="257 rows with 257 tokens"):
        buckets.fit([1] * 257)
    with pytest.raises(NoBucket, match="1 rows with 2049 tokens"):
        buckets.fit([2049])
    with pytest.raises(ValueError, match="1 <= max_rows <= max_tokens"):
        Buckets.for_limits(max_tokens=4, max_rows=5, max_blocks=1)


def test_wide_tables_are_for_those_who_need_them():
    buckets = Buckets.for_limits(max_tokens=2048, max_rows=256, max_blocks=2048)
    small = [(bucket.rows, bucket.blocks) for bucket in buckets if bucket.blocks < 2048]
    assert small == [(64, 1024), (96, 682), (128, 512), (192, 341), (256, 256)]
    assert len({*buckets}) == len(list(buckets)) <= 35
    assert buckets.fit([1] * 200, 256).blocks == 256
    assert buckets.fit([1] * 200, 257).blocks == 2048
    assert buckets.fit([1] * 200).blocks == 2048
    assert buckets.fit([1] * 9, 1).blocks == 2048
    assert buckets.fit([1] * 9 + [2], 1).blocks == 2048


@pytest.mark.parametrize(
    ("max_blocks", "widths"), [(132, [132]), (133, [132, 133]), (2048, [132, 2048])]
)
def test_a_short_row_has_a_table_that_a_faster_kernel_serves(max_blocks, widths):
    limits = {"max_tokens": 512, "max_rows": 32, "max_blocks": max_blocks}
    buckets = Buckets.for_limits(**limits, short_blocks=132)
    assert [bucket.blocks for bucket in buckets if bucket.rows == 1] == widths
    assert len(list(buckets)) == len(list(Buckets.for_limits(**limits))) + len(widths) - 1
    assert [buckets.fit([1], blocks).blocks for blocks in (1, 132)] == [132, 132]
    assert buckets.fit([1], max_blocks).blocks == buckets.fit([1]).blocks == max_blocks
    assert buckets.fit([1, 1], 1).blocks == max_blocks


@pytest.mark.parametrize(
    "counts",
    [[1], [37], [128], [512], [128, 128], [1, 32, 243], [64, 1, 1, 1, 1, 393, 27, 2], [1] * 9],
)
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("seen", [0, 7])
def test_round_trip(counts, alignment, seen):
    state = manager()
    buckets = Buckets.for_limits(
        max_tokens=640, max_rows=32, max_blocks=state.max_blocks, row_alignment=alignment
    )
    items = []
    for uid, count in enumerate(counts):
        state.track(uid, sampled=uid % 2 == 0)
        if seen:
            state.reserve(uid, seen)
            state.commit(uid)
        tokens = [LAST_SAMPLED] if count == 1 else list(range(1000 * uid, 1000 * uid + count))
        items.append(BatchItem(state.reserve(uid, count), tokens, emit=uid != 1))
    bucket = buckets.fit(counts)
    if seen:  # a table as narrow as it may be
        bucket = replace(bucket, blocks=max(item.sequence.end_block for item in items))
    packed = pack(bucket, items, state, row_alignment=alignment)
    assert packed.dtype == np.int32
    assert packed.shape == (packed_size(bucket, 2),)
    batch = jax.jit(unpack, static_argnums=(1, 2))(packed, bucket, 2)
    jax.tree.map(np.testing.assert_array_equal, batch, unpack(packed, bucket, 2))

    live = len(counts)
    for group, rows in enumerate(batch.rows):
        assert int(rows.num_rows) == live
        assert rows.query_lengths.tolist() == counts + [0] * (bucket.rows - live)
        expected = [seen + count for count in counts] + [0] * (bucket.rows - live)
        assert rows.kv_lengths.tolist() == expected
        assert (np.diff(rows.starts) >= 0).all()
        assert (np.asarray(rows.starts[:live]) % alignment == 0).all()
        table = np.asarray(rows.block_table)
        for row, item in enumerate(items):
            owned = slice(item.sequence.first_blocks[group], item.sequence.end_block)
            mine = state.tables[group][item.sequence.index, : bucket.blocks]
            assert np.array_equal(table[row], mine)
            assert (table[row, owned] < state.num_blocks[group]).all()
        assert (table[live:] == state.num_blocks[group]).all()
    places = batch.rows[0].token_places(bucket.tokens)
    valid, row, position = (np.asarray(x) for x in (places.valid, places.row, places.position))
    assert valid.sum() == sum(counts)
    token_ids = np.asarray(batch.token_ids)
    for index, item in enumerate(items):
        mine = valid & (row == index)
        assert token_ids[mine].tolist() == list(item.tokens)
        assert position[mine].tolist() == list(range(seen, seen + counts[index]))
        assert int(batch.last_index[index]) == np.flatnonzero(mine)[-1]
    assert (token_ids[~valid] == 0).all()
    assert batch.slots.tolist() == [
        *(item.sequence.slot for item in items),
        *[state.num_slots] * (bucket.rows - live),
    ]
    assert batch.emit.tolist() == [i != 1 for i in range(live)] + [False] * (bucket.rows - live)


def test_an_empty_batch_is_all_padding():
    state = manager()
    bucket = Bucket(tokens=4, rows=4, blocks=2, decode=True)
    batch = unpack(pack(bucket, [], state), bucket, 2)
    assert int(batch.rows[0].num_rows) == 0
    assert not batch.emit.any()
    assert (batch.rows[1].block_table == state.num_blocks[1]).all()


def test_batches_that_do_not_fit_are_refused():
    state = manager()
    sequence = state.track(1)
    bucket = Bucket(tokens=4, rows=1, blocks=1, decode=False)
    with pytest.raises(ValueError, match="has 0 tokens in flight, the batch brings 2"):
        pack(bucket, [BatchItem(sequence, [1, 2], emit=True)], state)
    state.reserve(1, 5)
    with pytest.raises(ValueError, match="1 rows with 5 tokens do not fit"):
        pack(bucket, [BatchItem(sequence, [1] * 5, emit=True)], state)
    wider = Bucket(tokens=8, rows=1, blocks=1, decode=False)
    with pytest.raises(ValueError, match="A row has 2 blocks, too many"):
        pack(wider, [BatchItem(sequence, [1] * 5, emit=True)], state)
    decode = Bucket(tokens=8, rows=8, blocks=4, decode=True)
    with pytest.raises(ValueError, match="rows of one token"):
        pack(decode, [BatchItem(sequence, [1] * 5, emit=True)], state)
