"""Every query head has exactly one place, next to its own KV head, on any number of shards."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxgen_checkpoints.heads import HeadLayout

DEEPSPEED = [
    *[
        (heads, heads, shards)
        for heads, shards in [(1, 1), (32, 1), (32, 8), (3, 2), (20, 8), (6, 8)]
    ],
    *[(4, 2, 1), (8, 2, 1), (64, 16, 8), (4, 2, 4), (20, 4, 8), (40, 10, 8), (30, 5, 8)],
]
ODD = [(7, kv, shards) for kv in (1, 7) for shards in (1, 2, 4, 8)]
SMOLLM2 = [(9, 3, shards) for shards in (2, 4, 8)]


def check_layout(layout):
    queries, kv = layout.queries_of_slot(), layout.kv_of_slot()
    assert queries.shape == (layout.kv_slots, layout.group)
    assert layout.kv_slots % layout.shards == 0
    live = queries >= 0
    assert sorted(queries[live]) == list(range(layout.heads))
    slots = np.broadcast_to(kv[:, None], queries.shape)
    np.testing.assert_array_equal(slots[live], queries[live] // (layout.heads // layout.kv_heads))
    assert set(kv[kv >= 0]) == set(range(layout.kv_heads))


@pytest.mark.parametrize(("heads", "kv_heads", "shards"), [*DEEPSPEED, *ODD, *SMOLLM2])
def test_known_layouts(heads, kv_heads, shards):
    check_layout(HeadLayout(heads, kv_heads, shards))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 16))
def test_any_layout(kv_heads, group, shards):
    layout = HeadLayout(kv_heads * group, kv_heads, shards)
    check_layout(layout)
    stride = group + 2
    rows = layout.qkv_rows().reshape(layout.kv_slots, layout.group + 2)
    for slot, queries in enumerate(layout.queries_of_slot()):
        kv = layout.kv_of_slot()[slot]
        expected = [-1 if q < 0 else kv * stride + q % group for q in queries]
        expected += [-1, -1] if kv < 0 else [kv * stride + group, kv * stride + group + 1]
        assert rows[slot].tolist() == expected


def test_one_shard_is_the_canonical_layout():
    assert HeadLayout(9, 3, 1).qkv_rows().tolist() == list(range(15))
    assert HeadLayout(9, 3, 1).query_rows().tolist() == list(range(9))


def test_heads_that_cannot_be_grouped_are_refused():
    with pytest.raises(ValueError, match="5 query heads cannot be grouped over 2 KV heads"):
        HeadLayout(5, 2, 1)
    with pytest.raises(ValueError, match="expected positive numbers"):
        HeadLayout(4, 0, 1)
