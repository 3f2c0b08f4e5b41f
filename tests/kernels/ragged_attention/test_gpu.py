"""The Hopper kernels: interpreted with race detection, lowered for CUDA, and chosen or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.pages import RaggedRows, abstract_kv_pages
from pallas_kernels.ragged_attention import gpu, ragged_attention
from pallas_kernels.ragged_attention.gpu_decode import DecodePlan
from pallas_kernels.ragged_attention.gpu_prefill import PrefillPlan
from pallas_kernels.ragged_attention.gpu_schedule import (
    BEGAN,
    BLOCK0,
    BLOCKS,
    COUNT,
    ENDED,
    HEAD,
    ITEM,
    LAST_ENDED,
    SEGMENTS,
    Queries,
    schedule,
)
from tests.kernels.ragged_attention.conformance import Case, make, oracle

DECODE, PREFILL = DecodePlan(workers=4, pairs=2, slots=5), PrefillPlan(sms=2, slots=3, block=128)
FEW = DecodePlan(workers=4, pairs=2, slots=4, tokens=4)
BOTH = PrefillPlan(sms=2, slots=3, block=128, longer_than=4), FEW
OPTIONS = {"window": 70, "soft_cap": 2.0, "sinks": True, "alibi": True}
SMALL = {"head_dim": 64, "page_size": 64}
INTERPRETED = {
    "decode": (DECODE, Case(((1, 70), (1, 1), (1, 200)), **SMALL)),
    "prefill": (PREFILL, Case(((37, 70), (1, 1), (20, 200)), **SMALL)),
    "prefill, one line": (
        PrefillPlan(sms=2, slots=3, block=64, lines=1),
        Case(((37, 70), (1, 1), (20, 200)), **SMALL),
    ),
    "decode, a row in many parts": (
        DecodePlan(workers=12, pairs=2, slots=4),
        Case(((1, 1200),), heads=2, kv_heads=1, padding_rows=0, padding_tokens=0, **SMALL),
    ),
    "few tokens a row": (BOTH, Case(((3, 70), (1, 1), (4, 200), (37, 70)), **SMALL)),
    "few tokens a row with options": (
        BOTH,
        Case(((2, 300), (4, 130)), heads=3, kv_heads=1, options=OPTIONS, **SMALL),
    ),
    "decode with options": (
        DECODE,
        Case(((1, 70), (2, 300)), heads=3, kv_heads=1, head_dim=64, page_size=128, options=OPTIONS),
    ),
    "prefill with options": (
        PREFILL,
        Case(((5, 70), (40, 300), (0, 0), (1, 128)), heads=3, kv_heads=1, options=OPTIONS, **SMALL),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "decode",
        "prefill",
        pytest.param("few tokens a row", marks=pytest.mark.slow),
        pytest.param("few tokens a row with options", marks=pytest.mark.slow),
        pytest.param("prefill, one line", marks=pytest.mark.slow),
        pytest.param("decode, a row in many parts", marks=pytest.mark.slow),
        pytest.param("decode with options", marks=pytest.mark.slow),
        pytest.param("prefill with options", marks=pytest.mark.slow),
    ],
)
def test_interpreted_without_races(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    plan, case = INTERPRETED[name]
    inputs = make(case, jnp.bfloat16)
    options = {"window": None, "soft_cap": None, "sinks": None, "alibi": None, **inputs.options}
    scale = case.head_dim**-0.5
    out, _ = gpu.run(
        inputs.q,
        inputs.k_new,
        inputs.v_new,
        inputs.pages,
        inputs.rows,
        scale=scale,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
        plans=plan if isinstance(plan, tuple) else (plan,),
        **options,
    )
    got, want = np.asarray(out).astype(np.float64), oracle(case, inputs, scale)
    padding = np.isnan(np.asarray(inputs.q).astype(np.float32)).any(axis=(1, 2))
    assert not got[padding].any()
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)  # NaN is not less
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


def _abstract(tokens: int, rows: int, heads: int, kv_heads: int, dim: int) -> tuple:
    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pages = abstract_kv_pages(64, page_size=64, kv_heads=kv_heads, head_dim=dim, dtype="bfloat16")
    q, new = (jax.ShapeDtypeStruct((tokens, h, dim), jnp.bfloat16) for h in (heads, kv_heads))
    return q, new, new, pages, RaggedRows(*[ints(rows)] * 3, ints(rows, 8), ints())


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "dim"),
    [(8, 2, 128), (256, 2, 64), (8, 4, 256), (256, 4, 256)],
    ids=["decode", "mixed", "wide decode", "wide mixed"],
)
@pytest.mark.timeout(120)  # Mosaic can search for layouts without end
def test_lowers_for_cuda_and_is_chosen_there(tokens: int, kv_heads: int, dim: int) -> None:
    args = _abstract(tokens, 8, 8, kv_heads, dim)
    with dispatch.lowering_for("cuda"):
        traced = jax.jit(lambda *a: ragged_attention(*a, scale=0.1)).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 72}, "heads of 72"),
        ({"page_size": 48}, "multiple of 64"),
        ({"dtype": np.dtype("float32")}, "bfloat16"),
    ],
)
def test_says_what_it_cannot_serve(change: dict, reason: str) -> None:
    shape = {"head_dim": 64, "page_size": 64, **change}
    dtype = shape.pop("dtype", jnp.bfloat16)
    case = Case(((1, 3),), **shape)
    inputs = make(case, dtype)
    args = (inputs.q, inputs.k_new, inputs.v_new, inputs.pages, inputs.rows)
    with pytest.raises(dispatch.UnsupportedShape, match=reason):
        ragged_attention(*args, scale=1.0, implementation="gpu")


@pytest.mark.newest
@pytest.mark.parametrize(
    ("seen", "least", "whole"),
    [
        ([1], 1, 0),
        ([70, 900, 0], 1, 0),
        ([70, 900, 0], 3, 4),
        ([5000, 0, 0], 2, 4),
        ([256, 0, 65], 1, 4),
        ([64] * 40, 1, 0),
        ([64] * 40, 1, 4),
        ([10 + 37 * i for i in range(50)], 1, 0),
        ([4096] * 85, 1, 0),
        ([900, 0, 960] * 86, 1, 0),
    ],
    ids=[
        *("one block", "fewer blocks than workers", "runs of three", "one row", "whole rows"),
        *("even", "whole, evenly", "uneven", "rows of one length", "two rows a worker"),
    ],
)
def test_the_cuts_cover_every_block_once_and_are_even(
    seen: list[int], least: int, whole: int
) -> None:
    workers, kv_heads = 264, 3
    row = jnp.arange(len(seen), dtype=jnp.int32)
    queries = Queries(row, row, jnp.asarray(seen, jnp.int32))
    plan = schedule(queries, kv_heads, None, workers, least=least, whole=whole)
    items, work = (np.asarray(x) for x in plan)
    covered = {}
    for worker, columns in enumerate(work):
        item, head, block, left = columns[[ITEM, HEAD, BLOCK0, COUNT]]
        for _ in range(columns[SEGMENTS]):
            count = min(items[item, BLOCKS] - block, left)
            for each in range(block, block + count):
                assert (item, head, each) not in covered
                covered[item, head, each] = worker
            head, left, block = head + 1, left - count, 0
            if head == kv_heads:
                item, head = item + 1, 0
        assert left == 0
    assert len(covered) == items[:, BLOCKS].sum() * kv_heads
    busy = work[work[:, COUNT] > 0]
    if items[:, BLOCKS].max() <= whole:
        assert not busy[:, BLOCK0].any()
        assert len(busy) == (items[:, BLOCKS] > 0).sum() * kv_heads
        return
    if len(seen) >= 85:
        assert not busy[:, BLOCK0].any()
        assert busy[:, COUNT].max() * workers * 16 <= len(covered) * 17
    else:
        assert busy[:, COUNT].max() - busy[:, COUNT].min() <= 1
    assert len(busy) == workers or busy[:, COUNT].min() >= min(least, len(covered) // len(busy))
    for columns in busy:
        item, head = columns[[ITEM, HEAD]]
        assert columns[BEGAN] == covered[item, head, 0]
        assert columns[ENDED] == covered[item, head, items[item, BLOCKS] - 1]
    lasts = [max(key for key, owner in covered.items() if owner == w) for w in range(len(busy))]
    for columns, (item, head, _) in zip(busy, lasts, strict=True):
        assert columns[LAST_ENDED] == covered[item, head, items[item, BLOCKS] - 1]


def test_layers_of_a_step_share_one_plan() -> None:
    def plans(rows: RaggedRows, layers: int) -> list:
        one = jax.jit(lambda rows: schedule(gpu.queries_of(rows, 8), 2, None, 4).work)
        return [one(rows) * (layer + 2) for layer in range(layers)]

    rows = _abstract(8, 8, 8, 2, 128)[-1]
    counts = []
    for layers in (1, 3):
        compiled = jax.jit(plans, static_argnums=1).lower(rows, layers).compile()
        counts.append(compiled.as_text().count(" reduce-window("))
    assert counts[0] == counts[1] > 0
