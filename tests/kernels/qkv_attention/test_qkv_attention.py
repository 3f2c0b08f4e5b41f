"""Attention from the raw product: plain, the Hopper kernel interpreted, and who chooses it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.pages import KVPages, RaggedRows, abstract_kv_pages
from pallas_kernels.qkv_attention import gpu, has_kernel, qkv_attention
from pallas_kernels.ragged_attention.gpu_decode import DecodePlan
from pallas_kernels.rope_write import Rotation
from tests.kernels.qkv_attention.raw import raw_product
from tests.kernels.ragged_attention.conformance import Case, make, oracle

NONE: dict[str, Any] = {"window": None, "soft_cap": None, "sinks": None, "alibi": None}
SMALL: dict[str, Any] = {"head_dim": 64, "page_size": 64}
OPTIONS: dict[str, Any] = {"window": 70, "soft_cap": 2.0, "sinks": True, "alibi": True}


def check(case: Case, run: Any, dtype: Any, tolerance: float, **turning: Any) -> None:
    """run(qkv, pages, rows, rotation, norms, scale, options) agrees with the oracle."""
    qkv, rotation, norms, inputs = raw_product(case, make(case, dtype), **turning)
    scale = case.head_dim**-0.5
    options = NONE | inputs.options
    out, pages = run(qkv, inputs.pages, inputs.rows, rotation, norms, scale, options)
    got, want = np.asarray(out).astype(np.float64), oracle(case, inputs, scale)
    padding = np.isnan(np.asarray(inputs.q).astype(np.float32)).any(axis=(1, 2))
    assert not got[padding].any()
    assert np.linalg.norm(got - want) < tolerance * np.linalg.norm(want)  # NaN is not less
    plain = jax.jit(KVPages.write)(inputs.pages, inputs.k_new, inputs.v_new, inputs.rows)
    for side, wanted in ((pages.keys, plain.keys), (pages.values, plain.values)):
        side, wanted = (np.asarray(each).astype(np.float32) for each in (side, wanted))
        np.testing.assert_allclose(side, wanted, rtol=1e-2, atol=1e-6)  # NaN where it was


@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_plain_implementations_turn_write_and_attend(implementation: str) -> None:
    def run(qkv: Any, pages: Any, rows: Any, rotation: Any, norms: Any, scale: Any, options: Any):
        return qkv_attention(
            qkv,
            pages,
            rows,
            rotation=rotation,
            norms=norms,
            scale=scale,
            implementation=implementation,
            **options,
        )

    case = Case(((1, 20), (5, 5), (0, 0), (7, 30)), heads=9, kv_heads=3)
    check(case, run, np.float32, 1e-5, half=6, norms=True, interleaved=True)


@pytest.mark.parametrize(
    ("case", "turning", "races"),
    [
        (Case(((1, 70), (1, 65), (1, 1), (1, 200)), **SMALL), {"half": 32, "norms": True}, True),
        pytest.param(
            Case(((1, 65), (1, 500)), heads=6, kv_heads=2, options=OPTIONS, **SMALL),
            {"half": 16, "norms": False},
            True,
            marks=pytest.mark.slow,
        ),
        # Rows of several tokens: one token's page is read while another's key goes into it, and
        # what was read of that place is not used.
        pytest.param(
            Case(((1, 70), (3, 130), (2, 2)), heads=3, kv_heads=1, **SMALL),
            {"half": 32, "norms": False},
            False,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["turned and normalised", "options", "several tokens a row"],
)
def test_one_kernel_serves_a_decode_step(
    case: Case, turning: dict, races: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(qkv: Any, pages: Any, rows: Any, rotation: Any, norms: Any, scale: Any, options: Any):
        return gpu.run(
            qkv,
            pages,
            rows,
            rotation=rotation,
            norms=norms,
            scale=scale,
            interpret=plgpu.InterpretGPUParams(detect_races=races),
            plan=DecodePlan(workers=4, pairs=2, slots=5),
            **options,
        )

    check(case, run, jnp.bfloat16, 1e-2, **turning)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


def _abstract(tokens: int, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pages = abstract_kv_pages(64, page_size=64, kv_heads=2, head_dim=128, dtype=dtype)
    rows = RaggedRows(*[ints(8)] * 3, ints(8, 8), ints())
    angles = jax.ShapeDtypeStruct((tokens, 64), jnp.float32)
    return jax.ShapeDtypeStruct((tokens, 2, 6, 128), dtype), pages, rows, Rotation(angles, angles)


@pytest.mark.parametrize(("tokens", "kernels"), [(8, 1), (256, 2)], ids=["decode", "prefill"])
def test_lowers_for_cuda_to_so_many_kernels(tokens: int, kernels: int) -> None:
    def step(qkv: Any, pages: Any, rows: Any, rotation: Any) -> Any:
        assert has_kernel(qkv, pages, rows, rotation=rotation)
        return qkv_attention(qkv, pages, rows, rotation=rotation, scale=0.1)

    with dispatch.lowering_for("cuda"):
        traced = jax.jit(step).trace(*_abstract(tokens))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels


def _served(dtype: Any) -> bool:
    answers = []

    def ask(qkv: Any, pages: Any, rows: Any, rotation: Any) -> None:
        answers.append(has_kernel(qkv, pages, rows, rotation=rotation))

    jax.eval_shape(ask, *_abstract(8, dtype))
    return answers == [True]


def test_a_model_turns_its_heads_itself_where_no_kernel_serves() -> None:
    assert not _served(jnp.bfloat16)  # on the platform of the tests
    with dispatch.lowering_for("cuda"):
        assert _served(jnp.bfloat16)
        assert not _served(jnp.float32)
        with dispatch.using(ragged_attention="portable"):
            assert not _served(jnp.bfloat16)
