"""What latent attention must do, as cases that every implementation runs against a float64 oracle.

Everything a row does not own is poisoned: pages of nobody, slots past a sequence's end, padding
tokens. An implementation that reads any of it gives NaN, one that writes any of it is caught.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.latent_pages import LatentPages, abstract_latent_pages
from pallas_kernels.pages import RaggedRows


@dataclass(frozen=True)
class Case:
    """lengths: (query, kv) of each live row; span: each row starts at a multiple of it."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    latent: int = 24
    width: int = 32
    page_size: int = 8
    padding_rows: int = 1
    padding_tokens: int = 3
    span: int = 1


MIXED = ((1, 20), (5, 5), (0, 0), (7, 30), (3, 8))
CASES = {
    "one_token_alone": Case(((1, 1),), padding_rows=0, padding_tokens=0),
    "decode": Case(((1, 1), (1, 8), (1, 9), (1, 40)), padding_rows=2, padding_tokens=2),
    "decode_full_bucket": Case(((1, 17), (1, 3)), padding_rows=0, padding_tokens=0),
    "nothing_live": Case((), padding_rows=2, padding_tokens=4),
    "zero_length_rows": Case(((0, 0), (0, 12), (4, 12), (0, 0)), padding_tokens=4),
    "prefill_full_pages": Case(((16, 16), (24, 32)), padding_rows=0, padding_tokens=0),
    "chunk_continuation": Case(((9, 27), (40, 41)), page_size=4),
    "mixed": Case(MIXED, padding_tokens=9),
    "spans_of_8": Case(MIXED, span=8),
    "one_page_rows": Case(((3, 60), (61, 64)), page_size=64),
    "one_head": Case(MIXED, heads=1),
    "heads_16": Case(MIXED, heads=16),
    "value_is_the_whole_key": Case(MIXED, latent=32),
    "v2_widths": Case(MIXED, latent=512, width=576),
}


@dataclass(frozen=True)
class Inputs:
    """One call's arguments, and each live row's tokens in order: [kv, width]."""

    q: jax.Array
    new: jax.Array
    pages: LatentPages
    rows: RaggedRows
    context: list[np.ndarray]


def make(case: Case, dtype: Any, seed: int = 0) -> Inputs:
    """Random inputs, everything unowned poisoned with NaN."""
    rng = np.random.default_rng(seed)
    starts, total = [], 0
    for query, _ in case.lengths:
        starts.append(total)
        total = -(-(total + query) // case.span) * case.span
    tokens = total + case.padding_tokens
    counts = [-(-kv // case.page_size) for _, kv in case.lengths]
    spare = case.padding_rows
    # Unowned table entries point out of the pool on purpose.
    table = np.full((len(counts) + spare, max([1, *counts]) + 1), 10**6, np.int32)
    ids = rng.permutation(sum(counts) + 3)
    pages = abstract_latent_pages(ids.size, page_size=case.page_size, width=case.width, dtype=dtype)
    pool = np.full(pages.latents.shape, np.nan, np.float32)
    q = rng.standard_normal((tokens, case.heads, case.width)).astype(np.float32).astype(dtype)
    new = np.full((tokens, case.width), np.nan, dtype)
    live = np.zeros(tokens, bool)
    context = []
    for row, (query, kv) in enumerate(case.lengths):
        whole = rng.standard_normal((kv, case.width)).astype(np.float32).astype(dtype)
        context.append(whole)
        table[row, : counts[row]], ids = ids[: counts[row]], ids[counts[row] :]
        for position in range(kv - query):
            slot = pool[table[row, position // case.page_size], position % case.page_size]
            slot[:] = 0
            slot[: case.width] = whole[position]
        span = slice(starts[row], starts[row] + query)
        live[span], new[span] = True, whole[kv - query :]
    q[~live] = np.nan
    rows = RaggedRows(
        starts=jnp.asarray(starts + [0] * spare, jnp.int32),
        query_lengths=jnp.asarray([n for n, _ in case.lengths] + [7] * spare, jnp.int32),
        kv_lengths=jnp.asarray([n for _, n in case.lengths] + [9] * spare, jnp.int32),
        block_table=jnp.asarray(table),
        num_rows=jnp.int32(len(case.lengths)),
    )
    pages = jax.tree.map(lambda leaf: jnp.asarray(pool.astype(leaf.dtype)), pages)
    return Inputs(jnp.asarray(q), jnp.asarray(new), pages, rows, context)


def oracle(case: Case, inputs: Inputs, scale: float) -> np.ndarray:
    """Outputs in float64 numpy, from each row's tokens in order."""
    q = np.asarray(inputs.q).astype(np.float64)
    out = np.zeros((*q.shape[:2], case.latent))
    starts = np.asarray(inputs.rows.starts)
    for row, (query, kv) in enumerate(case.lengths):
        whole = inputs.context[row].astype(np.float64)
        for offset in range(query):
            token = starts[row] + offset
            seen = whole[: kv - query + offset + 1]
            scores = scale * q[token] @ seen.T
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[token] = weights @ seen[:, : case.latent] / weights.sum(axis=-1, keepdims=True)
    return out


def assert_conforms(
    case: Case, implementation: str, dtype: Any = np.float32, tolerance: float = 1e-5
) -> None:
    """Right outputs, zeros for padding, and pages changed in the new tokens' slots alone."""
    inputs = make(case, dtype)
    scale = case.width**-0.5
    before = np.asarray(inputs.pages.latents).astype(np.float32)

    @jax.jit  # of a function of its own: what is chosen depends on the platform to be lowered for
    def step(q: Any, new: Any, pages: LatentPages, rows: RaggedRows) -> Any:
        options = {"scale": scale, "implementation": implementation}
        return latent_attention(q, new, pages, rows, latent=case.latent, **options)

    out, pages = step(inputs.q, inputs.new, inputs.pages, inputs.rows)
    got, want = np.asarray(out).astype(np.float64), oracle(case, inputs, scale)
    assert np.isfinite(got).all(), "something that the rows do not own was read"
    padding = np.isnan(np.asarray(inputs.q).astype(np.float32)).any(axis=(1, 2))
    assert not got[padding].any(), "outputs of padding tokens must be zeros"
    if dtype == np.float32:
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)
    else:
        error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-9)
        assert error < tolerance, f"relative error {error:.2e}"
    after = np.asarray(pages.latents).astype(np.float32)
    changed = ~np.isnan(after) & np.isnan(before)
    assert changed.all(axis=-1).sum() == sum(query for query, _ in case.lengths)
    np.testing.assert_array_equal(np.where(changed, np.nan, after), before)
    table = np.asarray(inputs.rows.block_table)
    for row, (_, kv) in enumerate(case.lengths):
        held = np.asarray(_read(pages, table[row])).astype(np.float32)
        np.testing.assert_array_equal(
            held[:kv, : case.width], inputs.context[row].astype(np.float32)
        )


_read = jax.jit(LatentPages.read)
