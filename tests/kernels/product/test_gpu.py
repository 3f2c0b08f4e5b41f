"""The Hopper product: interpreted with race detection, lowered for CUDA, chosen or left to XLA."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.product import gated_product, gpu, product
from pallas_kernels.product.checks import ProductProblem, check
from pallas_kernels.product.gpu_plan import Plan, choose
from tests.kernels.product.conformance import CASES, Case, assert_close, make

SLOW = {"seventeen_rows", "a_warpgroup", "many_rows", "gated_by_relu", "three_rows", "nine_rows"}


def _plan(tokens: int) -> Plan:
    """Few columns and slots, so that tiles and slots are many."""
    blocks = min(-(-tokens // 64), 4)
    return Plan(blocks=blocks, columns=32, depth=64, slots=2, cluster=1, clusters=2)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES]
)
def test_interpreted_without_races(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    x, weight, want = make(case, jnp.bfloat16)
    problem = check(x, weight, out_dtype=case.out_dtype, activation=case.activation)
    plan = _plan(case.tokens)
    # Where tiles overlap, the same numbers are written twice: by design, and a race for a detector.
    overlap = case.outputs % plan.columns or case.tokens > 256
    out = gpu.run(
        x,
        weight,
        problem,
        weight_is_input=True,
        plan=plan,
        interpret=plgpu.InterpretGPUParams(detect_races=not overlap),
    )
    assert out.dtype == problem.out_dtype
    assert_close(out, want)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


@pytest.mark.parametrize(
    ("tokens", "columns", "activation"),
    [(512, 48, "silu"), pytest.param(520, 32, None, marks=pytest.mark.slow)],
)
def test_shared_weights_without_races(
    tokens: int, columns: int, activation: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    x, weight, want = make(Case(tokens, outputs=96, activation=activation), jnp.bfloat16)
    problem = check(x, weight, out_dtype=None, activation=activation)
    plan = Plan(2, columns, depth=64, slots=2, cluster=2, clusters=2, shares_weights=True)
    overlap = tokens % (2 * plan.height)
    interpret = plgpu.InterpretGPUParams(detect_races=not overlap)
    out = gpu.run(x, weight, problem, weight_is_input=True, plan=plan, interpret=interpret)
    assert_close(out, want)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def _lowered(tokens: int, weight: tuple[int, ...], *, activation: str) -> str:
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((tokens, weight[-1]), weight)]
    with dispatch.lowering_for("cuda"):
        call = partial(gated_product, activation=activation, weight_is_input=True)
        traced = jax.jit(call).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("tokens", [250, 1000])
def test_lowers_for_cuda_and_is_chosen_there(tokens: int) -> None:
    assert "mosaic_gpu" in _lowered(tokens, (2, 14336, 4096), activation="silu")


@pytest.mark.parametrize(
    ("tokens", "outputs"), [(2048, 29568 // 8), (2048, 10944 // 8), (1024, 10976), (200, 10936)]
)
def test_a_shard_of_any_width_lowers_for_cuda(tokens: int, outputs: int) -> None:
    """Where the last tile begins within a line of shared memory, no kernel can store it."""
    assert _lowered(tokens, (2, outputs, 4096), activation="silu")


def test_shared_tokens_lower_for_cuda() -> None:
    plan = Plan(blocks=2, columns=64, depth=64, slots=4, cluster=2, clusters=66)
    x, weight = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((128, 4096), (1, 4096, 4096)))
    bfloat16 = jnp.dtype(jnp.bfloat16)
    problem = ProductProblem(128, 1, 4096, 4096, bfloat16, bfloat16, bfloat16, None)
    run = jax.jit(lambda x, w: gpu.run(x, w, problem, weight_is_input=True, plan=plan))
    assert "mosaic_gpu" in run.trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("shape", "options", "dtype", "reason"),
    [
        ((4096, 4100), {}, jnp.bfloat16, "multiples of 64"),
        ((4100, 4096), {}, jnp.bfloat16, "one of 8"),
        ((64, 4096), {}, jnp.bfloat16, "as fast"),
        ((4096, 4096), {}, jnp.float32, "bfloat16"),
        ((2, 4096, 4096), {"activation": "gelu"}, jnp.bfloat16, "gelu"),
    ],
)
def test_says_what_it_leaves_to_xla(
    shape: tuple, options: dict, dtype: jnp.dtype, reason: str
) -> None:
    call = product if len(shape) == 2 else gated_product
    x, weight = (jax.ShapeDtypeStruct(s, dtype) for s in ((8, shape[-1]), shape))
    with pytest.raises(dispatch.UnsupportedShape, match=reason):
        jax.eval_shape(lambda x, w: call(x, w, implementation="gpu", **options), x, weight)


@pytest.mark.parametrize("outputs", [14336, 11008, 28672, 9728])
def test_every_sm_gets_its_share(outputs: int) -> None:
    bfloat16 = jnp.dtype(jnp.bfloat16)
    problem = ProductProblem(256, 2, outputs, 4096, bfloat16, bfloat16, bfloat16, "silu")
    plan = choose(problem)
    assert isinstance(plan, Plan)
    rounds = -(-outputs // (plan.columns * 132))
    assert outputs >= 0.85 * rounds * 132 * plan.columns


def _many(tokens: int, parts: int, outputs: int, inputs: int) -> ProductProblem:
    bfloat16 = jnp.dtype(jnp.bfloat16)
    gate = "silu" if parts == 2 else None
    return ProductProblem(tokens, parts, outputs, inputs, bfloat16, bfloat16, bfloat16, gate)


@pytest.mark.parametrize("tokens", [512, 768, 1024, 1536, 2048, 3840, 8192])
@pytest.mark.parametrize("outputs", [14336, 7168, 18944])
def test_many_tokens_leave_few_sms_idle(tokens: int, outputs: int) -> None:
    plan = choose(_many(tokens, 2, outputs, 4096))
    assert isinstance(plan, Plan)
    assert plan.shares_weights
    tiles = -(-tokens // (2 * plan.height)) * -(-outputs // plan.columns)
    whole = -(-tiles // plan.clusters) * plan.clusters * 2 * plan.height * plan.columns
    assert tokens * outputs >= 0.75 * whole


@pytest.mark.parametrize("tokens", [264, 384])
def test_half_filled_tiles_are_left_to_xla(tokens: int) -> None:
    assert choose(_many(tokens, 2, 14336, 4096)) == "its tiles would leave too many SMs idle"
