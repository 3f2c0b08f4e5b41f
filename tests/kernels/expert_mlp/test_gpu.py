"""The Hopper kernels: interpreted with race detection, lowered for CUDA, and chosen or refused."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.expert_mlp import expert_mlp, gpu
from pallas_kernels.expert_mlp.gpu import ExpertsPlan
from pallas_kernels.expert_mlp.gpu_tiles import (
    Tiles,
    tiles_of_all_tokens,
    tiles_of_one_token,
    tiles_of_sorted_tokens,
)
from tests.kernels.expert_mlp.conformance import NOWHERE, Case, assert_conforms, gate, make

INTERPRETED = {
    "few": (Case(7, 2, 5, model=128, padding=1), ExpertsPlan(8, gather=False, sms=2, slots=2)),
    "few, bias": (
        Case(12, 3, 4, ffn=128, bias=True, shared=128),
        ExpertsPlan(16, gather=False, sms=3, slots=3),
    ),
    "few, shared": (Case(3, 2, 5, shared=128), ExpertsPlan(8, gather=False, sms=2, slots=2)),
    "one": (Case(1, 2, 5, shared=64), ExpertsPlan(8, gather=False, sms=2, slots=2)),
    "gathered": (
        Case(20, 2, 3, model=128, ffn=192, shared=192),
        ExpertsPlan(8, gather=True, sms=2, slots=2),
    ),
    "gathered, shard": (
        Case(20, 4, 3, routing="shard", padding=2, model=128, ffn=192),
        ExpertsPlan(8, gather=True, sms=2, slots=2),
    ),
    "gathered, in runs": (
        Case(31, 2, 3, model=128, ffn=192, shared=192),
        ExpertsPlan(8, gather=True, together=2, sms=2, slots=2),
    ),
    "gathered, runs of one expert": (
        Case(50, 2, 7, model=128, ffn=128, routing="one", padding=2, bias=True),
        ExpertsPlan(8, gather=True, together=4, sms=3, slots=2),
    ),
    "nothing": (Case(0, 2, 4, padding=4), ExpertsPlan(8, gather=False, sms=2, slots=2)),
    "many": (
        Case(150, 2, 2, model=128, padding=2, bias=True),
        ExpertsPlan(128, gather=True, sms=2, slots=2),
    ),
    "many, 96 wide": (
        Case(70, 2, 3, model=192, ffn=192, padding=2),
        ExpertsPlan(128, gather=True, sms=2, slots=2),
    ),
}
QUICK = ("one",)


@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in INTERPRETED],
)
def test_interpreted_without_races(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    case, plan = INTERPRETED[name]
    params = plgpu.InterpretGPUParams(detect_races=True)
    assert_conforms(partial(gpu.run, interpret=params, plan=plan), case, jnp.bfloat16, 1e-2)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


@pytest.mark.parametrize("tokens", [1, 64, 70, 2048])  # 70: in runs of tiles
def test_lowers_for_cuda_and_is_chosen_there(tokens: int) -> None:
    def abstract(*shape: int, dtype: type = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    args = (
        abstract(tokens, 256),
        abstract(tokens, 2, dtype=jnp.int32),
        abstract(tokens, 2, dtype=jnp.float32),
        abstract(8, 2, 128, 256),
        abstract(8, 256, 128),
    )
    with dispatch.lowering_for("cuda"):
        traced = jax.jit(partial(expert_mlp, gate=gate)).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": 96}, "multiples of 64"),
        ({"dtype": jnp.float32}, "bfloat16"),
        ({"gate": lambda a, b: jax.nn.gelu(a, approximate=False) * b}, "error function"),
    ],
)
def test_says_what_it_cannot_serve(change: dict, reason: str) -> None:
    shape = {"tokens": 3, "top_k": 2, "experts": 4, **change}
    dtype, by = shape.pop("dtype", jnp.bfloat16), shape.pop("gate", gate)
    *args, _, _ = make(Case(**shape), dtype)
    with pytest.raises(dispatch.UnsupportedShape, match=reason):
        expert_mlp(*args, gate=by, implementation="gpu")


@pytest.mark.parametrize(
    ("tokens", "columns", "make_tiles"),
    [
        (1, 8, tiles_of_one_token),
        (8, 8, tiles_of_all_tokens),
        (70, 72, tiles_of_all_tokens),
        (1, 8, tiles_of_sorted_tokens),
        (70, 8, tiles_of_sorted_tokens),
        (300, 16, tiles_of_sorted_tokens),
        (600, 16, tiles_of_sorted_tokens),  # more assignments than are compared each with each
    ],
)
def test_every_token_has_a_place_of_its_own_in_a_tile_of_its_expert(
    tokens: int, columns: int, make_tiles: Callable[..., Tiles]
) -> None:
    rng = np.random.default_rng(tokens)
    num_experts = 9
    experts = np.argsort(rng.random((tokens, 30)), axis=1)[:, :4].astype(np.int32)
    experts = np.where(experts < 15, experts - 3, NOWHERE)
    found = jax.jit(make_tiles, static_argnums=(1, 2))(experts, num_experts, columns)
    mine = (experts >= 0) & (experts < num_experts)
    np.testing.assert_array_equal(found.mine, mine)
    place, count = np.asarray(found.place)[mine], int(found.ends[-1])
    assert len(set(place)) == mine.sum()
    assert (place // columns < count).all()
    np.testing.assert_array_equal(np.asarray(found.expert)[place // columns], experts[mine])
    owner = place % columns if found.token is None else np.asarray(found.token)[place]
    np.testing.assert_array_equal(owner, np.nonzero(mine)[0])
    assert make_tiles is tiles_of_one_token or len(set(place // columns)) == count  # none is empty


@pytest.mark.parametrize(
    ("sizes", "num_experts"),
    [
        ((7, 0, 25, 16, 0, 1, 24, 40, 8), 9),
        ((64,), 5),
        ((), 9),
        ((1, 1, 33), 3),  # as many tiles and runs as there can be, and the last run is a short one
        ((25, 1, 1), 3),
    ],
    ids=str,
)
def test_runs_hold_every_tile_once_in_order(sizes: tuple[int, ...], num_experts: int) -> None:
    """sizes: tokens of each of the first experts; if there are none, tokens without any."""
    columns, together = 8, 3
    experts = np.repeat(np.arange(len(sizes)), sizes) if sizes else np.full(50, NOWHERE)
    experts = np.random.default_rng(0).permutation(experts)[:, None]
    experts = jnp.asarray(experts, jnp.int32)
    tiles = tiles_of_sorted_tokens(experts, num_experts, columns, together)
    alone = tiles_of_sorted_tokens(experts, num_experts, columns)
    assert tiles.runs is not None
    assert tiles.token is not None
    live = int(tiles.runs.ends[-1])
    expert, offset, end = (np.asarray(each)[:live] for each in tiles.runs[:3])
    first = offset + np.arange(live) * together
    count = np.minimum(end - first, together)
    assert (count >= 1).all()
    assert (count <= together).all()
    each = [(e, f + i) for e, f, n in zip(expert, first, count, strict=True) for i in range(n)]
    all_tiles = int(alone.ends[-1])
    assert each == list(zip(np.asarray(alone.expert)[:all_tiles], range(all_tiles), strict=True))
    needed = {
        e: -(-n // together)
        for e, n in zip(*np.unique(alone.expert[:all_tiles], return_counts=True), strict=True)
    }
    assert {e: int((expert == e).sum()) for e in needed} == needed  # and no more runs than that
    assert all((first + together) * columns <= len(tiles.token))  # what a run reads is there
    np.testing.assert_array_equal(tiles.place, alone.place)
