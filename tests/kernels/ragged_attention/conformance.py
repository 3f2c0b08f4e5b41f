"""What ragged attention must do, as cases that every implementation runs against a float64 oracle.

Everything a row does not own is poisoned: pages of nobody, slots past a sequence's end, padding
tokens. An implementation that reads any of it gives NaN, one that writes any of it is caught.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import KVPages, RaggedRows, abstract_kv_pages
from pallas_kernels.ragged_attention import ragged_attention


@dataclass(frozen=True)
class Case:
    """lengths: (query, kv) of each live row; span: each row starts at a multiple of it."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 8
    padding_rows: int = 1
    padding_tokens: int = 3
    span: int = 1
    options: dict[str, Any] = field(default_factory=dict)


MIXED = ((1, 20), (5, 5), (0, 0), (7, 30), (3, 8))
CASES = {
    "one_token_alone": Case(((1, 1),), padding_rows=0, padding_tokens=0),
    "decode": Case(((1, 1), (1, 8), (1, 9), (1, 40)), padding_rows=2, padding_tokens=2),
    "decode_full_bucket": Case(((1, 17), (1, 3)), padding_rows=0, padding_tokens=0),
    "decode_few_tokens": Case(((2, 9), (3, 24), (1, 1)), padding_rows=5, padding_tokens=2),
    "nothing_live": Case((), padding_rows=2, padding_tokens=4),
    "zero_length_rows": Case(((0, 0), (0, 12), (4, 12), (0, 0)), padding_tokens=4),
    "prefill_full_pages": Case(((16, 16), (24, 32)), padding_rows=0, padding_tokens=0),
    "chunk_continuation": Case(((9, 27), (40, 41)), page_size=4),
    "mixed": Case(MIXED, padding_tokens=9),
    "spans_of_8": Case(MIXED, span=8),
    "one_page_rows": Case(((3, 60), (61, 64)), page_size=64),
    "mqa": Case(MIXED, heads=5, kv_heads=1),
    "mha": Case(MIXED, heads=3, kv_heads=3),
    "group_3": Case(MIXED, heads=9, kv_heads=3, head_dim=64),
    "group_7": Case(MIXED, heads=7, kv_heads=1, head_dim=80),
    "head_96": Case(MIXED, head_dim=96),
    "head_128": Case(MIXED, head_dim=128),
    "head_192": Case(MIXED, head_dim=192),
    "head_256": Case(MIXED, head_dim=256),
    "window_1": Case(MIXED, options={"window": 1}),
    "window_9": Case(((1, 40), (1, 5), (20, 50)), options={"window": 9}),
    "window_8_decode": Case(((1, 40), (1, 5), (1, 8)), options={"window": 8}),
    "window_beyond_context": Case(MIXED, options={"window": 1000}),
    "soft_cap": Case(MIXED, options={"soft_cap": 1.5}),
    "sinks": Case(MIXED, options={"sinks": True}),
    "sinks_decode": Case(((1, 20), (1, 1)), options={"sinks": True}),
    "alibi": Case(MIXED, options={"alibi": True}),
    "alibi_table": Case(MIXED, heads=6, kv_heads=3, options={"alibi_table": True}),
    "all_options": Case(
        MIXED, options={"window": 6, "soft_cap": 2.0, "sinks": True, "alibi": True}
    ),
}


@dataclass(frozen=True)
class Inputs:
    """One call's arguments, and each live row's keys and values in order: [kv, kv_heads, head]."""

    q: jax.Array
    k_new: jax.Array
    v_new: jax.Array
    pages: KVPages
    rows: RaggedRows
    options: dict[str, Any]
    context: list[tuple[np.ndarray, np.ndarray]]


def make(case: Case, dtype: Any, seed: int = 0, min_pages: int = 0) -> Inputs:
    """Random inputs, everything unowned poisoned with NaN."""
    rng = np.random.default_rng(seed)
    starts, total = [], 0
    for query, _ in case.lengths:
        starts.append(total)
        total = -(-(total + query) // case.span) * case.span
    tokens = total + case.padding_tokens
    blocks = max([1, *(-(-kv // case.page_size) for _, kv in case.lengths)]) + 1
    owned = sum(-(-kv // case.page_size) for _, kv in case.lengths)
    pool = max(owned + 3, min_pages)
    spare = case.padding_rows
    # Unowned table entries point out of the pool on purpose.
    table = np.full((len(case.lengths) + spare, blocks), 10**6, np.int32)
    ids = rng.permutation(pool)
    for row, (_, kv) in enumerate(case.lengths):
        count = -(-kv // case.page_size)
        table[row, :count], ids = ids[:count], ids[count:]
    rows = RaggedRows(
        starts=jnp.asarray(starts + [0] * spare, jnp.int32),
        query_lengths=jnp.asarray([q for q, _ in case.lengths] + [7] * spare, jnp.int32),
        kv_lengths=jnp.asarray([kv for _, kv in case.lengths] + [9] * spare, jnp.int32),
        block_table=jnp.asarray(table),
        num_rows=jnp.int32(len(case.lengths)),
    )

    def normal(*shape: int) -> np.ndarray:
        return np.array(rng.standard_normal(shape).astype(np.float32).astype(dtype))

    q = normal(tokens, case.heads, case.head_dim)
    new = [normal(tokens, case.kv_heads, case.head_dim) for _ in range(2)]
    context = [
        (normal(kv, case.kv_heads, case.head_dim), normal(kv, case.kv_heads, case.head_dim))
        for _, kv in case.lengths
    ]
    live = np.zeros(tokens, bool)
    for row, (query, kv) in enumerate(case.lengths):
        span = slice(starts[row], starts[row] + query)
        live[span] = True
        for each, whole in zip(new, context[row], strict=True):
            whole[kv - query :] = each[span]
    for each in (q, *new):
        each[~live] = np.nan
    options = dict(case.options)
    for name in ("sinks", "alibi"):
        if options.get(name):
            options[name] = jnp.asarray(np.abs(rng.standard_normal(case.heads)), jnp.float32)
    if options.pop("alibi_table", False):
        shape = (case.heads, rows.block_table.shape[1] * case.page_size)
        options["alibi"] = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    pages = _past(case, rows, context, pool, dtype)
    arrays = (jnp.asarray(each) for each in (q, *new))
    return Inputs(*arrays, pages=pages, rows=rows, options=options, context=context)


def _past(
    case: Case,
    rows: RaggedRows,
    context: list[tuple[np.ndarray, np.ndarray]],
    pool: int,
    dtype: Any,
) -> KVPages:
    """Pages that hold what the rows had before this step, and NaN elsewhere."""
    pages = abstract_kv_pages(
        pool,
        page_size=case.page_size,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=dtype,
    )
    pages = jax.tree.map(lambda leaf: jnp.asarray(np.full(leaf.shape, np.nan, dtype)), pages)
    past = [kv - query for query, kv in case.lengths]
    if not sum(past):
        return pages
    lengths = np.zeros(rows.starts.shape[0], np.int32)
    lengths[: len(past)] = past
    before = RaggedRows(
        starts=jnp.asarray(np.cumsum(lengths) - lengths, jnp.int32),
        query_lengths=jnp.asarray(lengths),
        kv_lengths=jnp.asarray(lengths),
        block_table=rows.block_table,
        num_rows=rows.num_rows,
    )
    keys, values = (
        np.concatenate([whole[side][:n] for whole, n in zip(context, past, strict=True)])
        for side in (0, 1)
    )
    return jax.jit(KVPages.write)(pages, keys, values, before)


def oracle(case: Case, inputs: Inputs, scale: float) -> np.ndarray:
    """Outputs in float64 numpy, from each row's keys and values in order."""
    q = np.asarray(inputs.q).astype(np.float64)
    out = np.zeros_like(q)
    window, cap = inputs.options.get("window"), inputs.options.get("soft_cap")
    sinks, alibi = (
        None if option is None else np.asarray(option, np.float64)
        for option in (inputs.options.get("sinks"), inputs.options.get("alibi"))
    )
    starts = np.asarray(inputs.rows.starts)
    group = case.heads // case.kv_heads
    for row, (query, kv) in enumerate(case.lengths):
        keys, values = (side.astype(np.float64) for side in inputs.context[row])
        for offset in range(query):
            token = starts[row] + offset
            at = kv - query + offset
            low = 0 if window is None else max(0, at - window + 1)
            seen = np.arange(low, at + 1)
            for head in range(case.heads):
                scores = scale * keys[seen, head // group] @ q[token, head]
                if cap is not None:
                    scores = cap * np.tanh(scores / cap)
                if alibi is not None:
                    slope = alibi[head]
                    scores = scores + (slope * (seen - at) if slope.ndim == 0 else slope[seen])
                sink = [] if sinks is None else [sinks[head]]
                top = max([scores.max(), *sink])
                weights = np.exp(scores - top)
                total = weights.sum() + sum(np.exp(each - top) for each in sink)
                out[token, head] = weights @ values[seen, head // group] / total
    return out


def assert_conforms(
    case: Case, implementation: str, dtype: Any = np.float32, tolerance: float = 1e-5
) -> None:
    """Right outputs, zeros for padding, and pages changed in the new tokens' slots alone."""
    inputs = make(case, dtype)
    scale = case.head_dim**-0.5
    before = _everything(inputs.pages)
    written = _everything(jax.jit(KVPages.write)(inputs.pages, *_new(inputs), inputs.rows))

    @jax.jit
    def step(q: Any, k_new: Any, v_new: Any, pages: KVPages, rows: RaggedRows) -> Any:
        return ragged_attention(
            q,
            k_new,
            v_new,
            pages,
            rows,
            scale=scale,
            implementation=implementation,
            **inputs.options,
        )

    out, pages = step(inputs.q, *_new(inputs), inputs.pages, inputs.rows)
    got = np.asarray(out).astype(np.float64)
    want = oracle(case, inputs, scale)
    assert np.isfinite(got).all(), "something that the rows do not own was read"
    padding = np.isnan(np.asarray(inputs.q).astype(np.float32)).any(axis=(1, 2))
    assert not got[padding].any(), "outputs of padding tokens must be zeros"
    if dtype == np.float32:
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)
    else:
        error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-9)
        assert error < tolerance, f"relative error {error:.2e}"
    new_slots = sum(query for query, _ in case.lengths)
    for old, after, plain in zip(before, _everything(pages), written, strict=True):
        np.testing.assert_array_equal(after, plain)
        changed = ~np.isnan(plain) & np.isnan(old)
        assert changed.all(axis=-1).sum() == new_slots * case.kv_heads


def _new(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    return inputs.k_new, inputs.v_new


@jax.jit
def _read_all(pages: KVPages) -> tuple[jax.Array, jax.Array]:
    return pages.read(jnp.arange(pages.num_pages, dtype=jnp.int32))


def _everything(pages: KVPages) -> list[np.ndarray]:
    return [np.asarray(side).astype(np.float32) for side in _read_all(pages)]
