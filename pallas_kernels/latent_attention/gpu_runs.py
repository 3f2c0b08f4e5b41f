"""The runs of KV blocks that workers attend: even ones, or whole rows where those are nearly even.

A row that is cut costs two partial results, their joining, and a second reading of its queries.
"""

import jax.numpy as jnp

from pallas_kernels.ragged_attention.gpu_schedule import (
    BLOCK0,
    BLOCKS,
    COUNT,
    ITEM,
    SEGMENTS,
    Queries,
    Schedule,
    schedule,
)


def even_runs(queries: Queries, workers: int) -> Schedule:
    """The blocks of all queries in one run a worker, cut at rows where the longest run suffers
    little.
    """
    cut = schedule(queries, 1, None, workers)
    blocks, work = cut.items[:, BLOCKS], cut.work
    items = blocks.shape[0]
    begins = jnp.pad(jnp.cumsum(blocks), (1, 0))  # of each item, and the end of the last
    item, busy = work[:, ITEM], work[:, COUNT] > 0
    nearest = item + (2 * work[:, BLOCK0] > blocks[item])
    first = jnp.where(busy, nearest, items).astype(jnp.int32)
    after = jnp.pad(first[1:], (0, 1), constant_values=items)
    count = begins[after] - begins[first]
    whole = jnp.zeros_like(work)
    for column, values in (
        (ITEM, jnp.minimum(first, items - 1)),
        (COUNT, count),
        (SEGMENTS, jnp.where(count > 0, after - first, 0)),
    ):
        whole = whole.at[:, column].set(values)
    fits = workers * count.max() - begins[-1] <= begins[-1] // 16  # in terms that int32 holds
    return Schedule(items=cut.items, work=jnp.where(fits, whole, work))
