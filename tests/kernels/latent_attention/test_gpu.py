"""The Hopper kernels: interpreted with race detection, lowered for CUDA, and chosen or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.latent_attention import gpu, latent_attention
from pallas_kernels.latent_attention.gpu_decode import DecodePlan
from pallas_kernels.latent_attention.gpu_runs import even_runs
from pallas_kernels.latent_attention.gpu_tiles import TilePlan, make_tiles
from pallas_kernels.latent_pages import abstract_latent_pages
from pallas_kernels.pages import RaggedRows
from pallas_kernels.ragged_attention.gpu_schedule import (
    BLOCK0,
    BLOCKS,
    COUNT,
    ITEM,
    SEGMENTS,
    Queries,
)
from tests.kernels.latent_attention.conformance import Case, make, oracle

WIDTHS = {"latent": 512, "width": 576}
RAGGED = ((37, 70), (1, 1), (6, 150), (0, 0))
DECODE, TILES = DecodePlan(workers=2, slots=4), TilePlan(workers=2)
INTERPRETED = {
    "decode": (DECODE, Case(((1, 70), (1, 1), (1, 150)), heads=5, page_size=64, **WIDTHS)),
    "tiles": (TILES, Case(((3, 70), (1, 150)), heads=16, page_size=64, **WIDTHS)),
    "decode, larger pages": (
        DecodePlan(workers=5, slots=7),
        Case(((2, 70), (1, 64), (0, 0), (1, 400)), heads=16, page_size=128, **WIDTHS),
    ),
    "tiles, ragged": (TilePlan(workers=3), Case(RAGGED, heads=20, page_size=128, **WIDTHS)),
    "tiles, a token in two": (TILES, Case(((1, 70), (2, 90)), heads=100, page_size=64, **WIDTHS)),
    "tiles, a long row, cut": (
        TILES,
        Case(((1, 640), (0, 0), (1, 1)), heads=64, page_size=128, **WIDTHS),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "decode",
        "tiles",
        pytest.param("decode, larger pages", marks=pytest.mark.slow),
        pytest.param("tiles, ragged", marks=pytest.mark.slow),
        pytest.param("tiles, a token in two", marks=pytest.mark.slow),
        pytest.param("tiles, a long row, cut", marks=pytest.mark.slow),
    ],
)
def test_interpreted_without_races(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    plan, case = INTERPRETED[name]
    inputs = make(case, jnp.bfloat16)
    scale = case.width**-0.5
    out, _ = gpu.run(
        inputs.q,
        inputs.new,
        inputs.pages,
        inputs.rows,
        latent=case.latent,
        scale=scale,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
        plan=plan,
    )
    got, want = np.asarray(out).astype(np.float64), oracle(case, inputs, scale)
    padding = np.isnan(np.asarray(inputs.q).astype(np.float32)).any(axis=(1, 2))
    assert not got[padding].any()
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)  # NaN is not less
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


def _abstract(tokens: int, rows: int, heads: int) -> tuple:
    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pages = abstract_latent_pages(64, page_size=64, width=576, dtype="bfloat16")
    q = jax.ShapeDtypeStruct((tokens, heads, 576), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((tokens, 576), jnp.bfloat16)
    return q, new, pages, RaggedRows(*[ints(rows)] * 3, ints(rows, 8), ints())


@pytest.mark.parametrize(
    ("tokens", "heads"), [(8, 20), (8, 128), (64, 16)], ids=["decode", "many heads", "prefill"]
)
def test_lowers_for_cuda_and_is_chosen_there(tokens: int, heads: int) -> None:
    args = _abstract(tokens, 8, heads)
    with dispatch.lowering_for("cuda"):
        traced = jax.jit(lambda *a: latent_attention(*a, latent=512, scale=0.1)).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"latent": 24, "width": 32}, "a latent of 24 of 32"),
        ({"page_size": 48}, "multiple of 64"),
        ({"dtype": np.dtype("float32")}, "bfloat16"),
    ],
)
def test_says_what_it_cannot_serve(change: dict, reason: str) -> None:
    shape = {"page_size": 64, **WIDTHS, **change}
    dtype = shape.pop("dtype", jnp.bfloat16)
    case = Case(((1, 3),), **shape)
    inputs = make(case, dtype)
    args = (inputs.q, inputs.new, inputs.pages, inputs.rows)
    with pytest.raises(dispatch.UnsupportedShape, match=reason):
        latent_attention(*args, latent=case.latent, scale=1.0, implementation="gpu")


@pytest.mark.newest
def test_tiles_hold_every_query_token_once() -> None:
    lengths = ((37, 70), (1, 1), (0, 12), (8, 8), (5, 150))
    rows = make(Case(lengths, padding_rows=2, padding_tokens=4), np.float32).rows
    queries, counts = make_tiles(rows, sum(n for n, _ in lengths) + 4, 4)
    found = {}
    columns = (queries.token, queries.row, queries.seen, counts)
    for token, row, seen, count in zip(*map(np.asarray, columns), strict=True):
        for ahead in range(count):
            assert token + ahead not in found
            found[int(token + ahead)] = (int(row), int(seen - count + 1 + ahead))
    wanted, token = {}, 0
    for row, (query, kv) in enumerate(lengths):
        for position in range(kv - query, kv):
            wanted[token] = (row, position + 1)
            token += 1
    assert found == wanted


@pytest.mark.newest
@pytest.mark.parametrize(
    ("seen", "cuts"),
    [([4096] * 128, False), ([1024] * 256, False), ([5000, 0, 0], True), ([64, 900, 3] * 90, True)],
    ids=["a row each", "two rows each", "one long row", "uneven"],
)
def test_runs_cover_every_block_once_and_cut_rows_only_where_it_helps(
    seen: list[int], cuts: bool
) -> None:
    row = jnp.arange(len(seen), dtype=jnp.int32)
    items, work = map(np.asarray, even_runs(Queries(row, row, jnp.asarray(seen, jnp.int32)), 132))
    blocks = items[:, BLOCKS]
    covered = []
    for item, block, left, segments in work[:, [ITEM, BLOCK0, COUNT, SEGMENTS]]:
        for each in range(item, item + segments):
            count = min(blocks[each] - block, left)
            covered += [(each, block + i) for i in range(count)]
            block, left = 0, left - count
        assert left == 0
    assert covered == [(item, i) for item, count in enumerate(blocks) for i in range(count)]
    assert work[:, COUNT].max() <= 1.07 * blocks.sum() / 132 + 1
    assert work[:, BLOCK0].any() == cuts
