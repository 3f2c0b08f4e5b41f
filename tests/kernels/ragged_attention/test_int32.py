"""Work lists of batches so long that products of their numbers leave int32: beside Python's own."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_attention.gpu_runs import even_runs
from pallas_kernels.ragged_attention.gpu_schedule import (
    BEGAN,
    BLOCK0,
    BLOCKS,
    COUNT,
    ENDED,
    HEAD,
    ITEM,
    LAST_ENDED,
    Queries,
    schedule,
)

MANY_SHARE = [131_072 - 3 * row for row in range(512)]
"""512 sequences of 128k tokens, which they can only hold together if they share them."""


def queries(seen):
    row = jnp.zeros(len(seen), jnp.int32)
    return Queries(row, row, jnp.asarray(seen, jnp.int32))


@pytest.mark.parametrize(
    ("seen", "kv_heads", "workers"),
    [
        (MANY_SHARE, 8, 264),
        ([1_000_000 + 64 * row for row in range(1024)], 8, 132),
        ([10**7 - 2048 + tile for tile in range(2048)], 1, 132),
    ],
    ids=["shared 128k", "shared 1M", "a prompt's tiles"],
)
def test_even_runs_end_where_they_do_without_bounds(seen, kv_heads, workers):
    plan = schedule(queries(seen), kv_heads, None, workers, least=2, whole=4)
    work, blocks = np.asarray(plan.work, np.int64), [-(-each // 64) for each in seen]
    total = sum(blocks) * kv_heads
    assert total * workers > 2**31
    cuts = [worker * total // workers for worker in range(workers + 1)]
    np.testing.assert_array_equal(work[:, COUNT], np.diff(cuts))
    np.testing.assert_array_equal(np.asarray(plan.items)[:, BLOCKS], blocks)
    before = np.concatenate([[0], np.cumsum(blocks)]) * kv_heads
    size = np.array(blocks)[work[:, ITEM]]
    row = before[work[:, ITEM]] + work[:, HEAD] * size  # where its first (item, head) begins
    np.testing.assert_array_equal(row + work[:, BLOCK0], cuts[:-1])

    def holder(places):
        return np.searchsorted(cuts, places, side="right") - 1

    np.testing.assert_array_equal(work[:, BEGAN], holder(row))
    np.testing.assert_array_equal(work[:, ENDED], holder(row + size - 1))
    ends = np.cumsum(np.repeat(blocks, kv_heads))
    last = ends[np.searchsorted(ends, cuts[1:])]  # of the row that a worker is in at its end
    np.testing.assert_array_equal(work[:, LAST_ENDED], holder(last - 1))


def test_rows_of_one_length_are_left_whole_however_long():
    plan = schedule(queries([1_000_000] * 264), 8, None, 264, least=2, whole=4)
    assert set(np.asarray(plan.work)[:, COUNT].tolist()) == {8 * 15_625}


def test_latent_runs_cover_every_block():
    seen = [10**7 - 2048 + tile for tile in range(2048)]
    count = np.asarray(even_runs(queries(seen), 132).work, np.int64)[:, COUNT]
    blocks = sum(-(-each // 64) for each in seen)
    assert count.sum() == blocks > 2**31 // 16
    assert (abs(count - blocks / 132) < blocks / 132 / 8).all()
