"""The Hopper kernel of the chain: interpreted with race detection, lowered, chosen or refused.

The interpreter has no barrier of the whole grid, so that there each stage is a launch; the barrier
itself is checked on the device (tests/kernels/device/layer_chain.py).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.layer_chain import ChainProblem, ChainWeights, chain_state, gpu, layer_chain
from pallas_kernels.layer_chain.gpu_plan import Plan
from tests.kernels.layer_chain.conformance import difference, make, oracle

FITS = ChainProblem(
    rows=1,
    inner=4096,
    model=4096,
    ffn=14336,
    fused=6144,
    bias=False,
    activation="silu",
    dtype=jnp.dtype(jnp.bfloat16),
)


@pytest.mark.parametrize(
    ("rows", "options", "plan", "activation"),
    [
        # Three blocks of threads never share evenly; hidden tokens come chunk by chunk. One row's
        # chain is interpreted behind its attention, too (attend_chain), which is no slow test.
        pytest.param(
            3,
            {"ffn": 1536},
            Plan(blocks=3, columns=64, slots=3, chunks=2),
            "silu",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            1,
            {"fused": None},
            Plan(blocks=2, columns=64, slots=2, chunks=2),
            "gelu_tanh",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            {"inner": 1024, "bias": True},
            Plan(blocks=5, columns=64, slots=4, chunks=2),
            "silu",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            5,
            {"inner": 1024, "model": 1024},
            Plan(blocks=3, columns=128, slots=3, chunks=2),
            "silu",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            8,
            {"ffn": 1536},
            Plan(blocks=4, columns=64, slots=2, chunks=2),
            "silu",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_interpreted_without_races(
    rows: int, options: dict, plan: Plan, activation: str, capfd: pytest.CaptureFixture[str]
) -> None:
    attended, residual, weights = make(rows, **options)
    got, fused, _ = gpu.run(
        attended,
        residual,
        weights,
        chain_state(),
        eps=1e-5,
        activation=activation,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
        plan=plan,
    )
    want, want_fused = oracle(attended, residual, weights, 1e-5, activation)
    assert difference(got, want) < 1e-2
    if want_fused is not None:
        assert difference(fused, want_fused) < 1e-2
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


def _shapes(model: int, ffn: int, fused: int, rows: int) -> tuple:
    def shape(*axes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(axes, jnp.bfloat16)

    weights = ChainWeights(
        out=shape(model, model),
        mlp_norm=shape(model),
        gate_up=shape(2, ffn, model),
        down=shape(model, ffn),
        next_norm=shape(model),
        qkv=shape(fused, model),
        ahead=shape(model, model),
    )
    return shape(rows, model), shape(rows, model), weights, chain_state()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("model", "ffn", "fused"), [(4096, 14336, 6144), (3584, 18944, 4608)])
def test_lowers_for_cuda(rows: int, model: int, ffn: int, fused: int) -> None:
    def step(*arguments):
        with dispatch.lowering_for("cuda"):
            return layer_chain(*arguments, eps=1e-5, activation="silu", implementation="gpu")

    traced = jax.jit(step).trace(*_shapes(model, ffn, fused, rows))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": 9}, "up to 8 rows"),
        ({"model": 4000}, "multiples of 512"),
        ({"model": 8192, "rows": 8}, "too little shared memory"),
        ({"fused": 6100}, "multiple of 128"),
        ({"dtype": jnp.dtype(jnp.float32)}, "bfloat16 only"),
    ],
)
def test_what_it_cannot_serve_it_refuses(change: dict, why: str) -> None:
    assert gpu.unsupported(FITS) is None
    assert why in gpu.unsupported(replace(FITS, **change))
