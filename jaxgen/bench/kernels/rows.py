"""Rows of a step whose pages lie in no order, as in a pool that has been used for a while."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import RaggedRows

UNOWNED = 2**30
"""In a table where no page is owned: whoever reads it fails."""


def shuffled_rows(
    lengths: Sequence[tuple[int, int]], page: int, spare: int = 0
) -> tuple[RaggedRows, int]:
    """Rows of (query, kv) lengths, and how many pages the pool must have.

    spare: rows of padding behind them.
    """
    rng = np.random.default_rng(0)
    blocks = [-(-kv // page) for _, kv in lengths]
    ids = rng.permutation(sum(blocks) + 5)
    table = np.full((len(lengths) + spare, max(blocks)), UNOWNED, np.int32)
    used = 0
    for row, count in enumerate(blocks):
        table[row, :count] = ids[used : used + count]
        used += count
    queries = [q for q, _ in lengths]
    starts = np.cumsum([0, *queries])[:-1]
    pad = [0] * spare
    rows = RaggedRows(
        *(
            jnp.asarray([*each, *pad], jnp.int32)
            for each in (starts, queries, [kv for _, kv in lengths])
        ),
        block_table=jnp.asarray(table),
        num_rows=jnp.int32(len(lengths)),
    )
    return rows, len(ids)
