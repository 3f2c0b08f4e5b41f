"""Tokens sorted by experts: the kernel's tiles are those of plain JAX, with their rows in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.expert_mlp.gpu_sort import sort_rows, sorts
from pallas_kernels.expert_mlp.gpu_tiles import tiles_of_sorted_tokens

COLUMNS = 16


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "sms"), [(64, 32), (72, 9)], ids=str)
def test_interpreted_without_races(
    tokens: int, sms: int, capfd: pytest.CaptureFixture[str]
) -> None:
    experts, choices, random = 24, 3, np.random.default_rng(0)
    chosen = np.stack([random.permutation(experts + 3)[:choices] - 1 for _ in range(tokens)])
    chosen[random.random(tokens) < 0.1] = -1
    chosen = jnp.asarray(chosen, jnp.int32)
    x = jnp.asarray(random.standard_normal((tokens, 128)), jnp.bfloat16)
    rows, tiles = sort_rows(
        x,
        chosen,
        num_experts=experts,
        columns=COLUMNS,
        sms=sms,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    wanted = tiles_of_sorted_tokens(chosen, experts, COLUMNS)
    live = int(wanted.ends[-1])
    assert int(tiles.ends[-1]) == live
    np.testing.assert_array_equal(tiles.expert[:live], wanted.expert[:live])
    np.testing.assert_array_equal(tiles.mine, wanted.mine)
    mine = np.asarray(wanted.mine)
    np.testing.assert_array_equal(np.asarray(tiles.place)[mine], np.asarray(wanted.place)[mine])
    assert wanted.token is not None
    place = np.asarray(wanted.place)[mine]
    np.testing.assert_array_equal(
        rows[place].astype(jnp.float32), x[wanted.token[place]].astype(jnp.float32)
    )
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


def test_lowers_for_cuda() -> None:
    shapes = [
        jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16),
        jax.ShapeDtypeStruct((8192, 6), jnp.int32),
    ]
    with dispatch.lowering_for("cuda"):
        run = jax.jit(lambda x, e: sort_rows(x, e, num_experts=64, columns=128, sms=132))
        text = run.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("case", "fits"),
    [
        ((8192, 128, 8, 132), True),
        ((8192, 128, 8, 114), False),  # more blocks of threads than run at a time
        ((8200, 128, 8, 132), False),  # not in even parts
        ((1024, 512, 8, 132), False),
        ((1024, 128, 9, 132), False),
        ((32, 128, 8, 132), False),
    ],
    ids=str,
)
def test_says_what_it_serves(case: tuple[int, int, int, int], fits: bool) -> None:
    assert sorts(*case) == fits
