"""Heads turned and written: the reference, the Hopper kernel interpreted, what is refused."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.pages import KVPages
from pallas_kernels.rope_write import HeadNorms, Rotation, gpu, rope_write
from pallas_kernels.rope_write.reference import heads_of
from tests.kernels.qkv_attention.raw import raw_product
from tests.kernels.ragged_attention.conformance import Case, make


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_turn_by_their_angle_and_norms_come_first(interleaved: bool) -> None:
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((3, 2, 3, 8)).astype(np.float32)
    angle = rng.uniform(0, 6, (3, 2)).astype(np.float32)
    weight = rng.standard_normal(8).astype(np.float32)
    rotation = Rotation(jnp.cos(angle), jnp.sin(angle), interleaved)
    norms = HeadNorms(jnp.asarray(weight), jnp.ones(8), eps=0.0, offset=1.0)
    q, k, v = heads_of(jnp.asarray(qkv), rotation, norms)
    np.testing.assert_array_equal(v, qkv[:, :, 2])
    for got, place, factor in ((q, 0, 1 + weight), (k, 1, 2.0)):
        x = qkv[:, :, place]
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True)) * factor
        first, second = ([0, 2], [1, 3]) if interleaved else ([0, 1], [2, 3])
        turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)[:, None]
        x[..., first], x[..., second] = turned.real, turned.imag
        np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "half", "norms", "interleaved"),
    [
        (Case(((5, 70), (1, 1), (2, 200)), heads=6, page_size=64, head_dim=64), 16, True, False),
        (Case(((5, 70), (1, 1), (2, 200)), heads=6, page_size=64, head_dim=64), 20, True, True),
        pytest.param(
            Case(((70, 70), (3, 130)), heads=12, kv_heads=12, page_size=64, head_dim=64),
            *(32, False, False),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["group of 3", "interleaved", "two blocks of heads"],
)
def test_kernel_writes_what_the_reference_writes(
    case: Case, half: int, norms: bool, interleaved: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    qkv, rotation, head_norms, inputs = raw_product(
        case, make(case, jnp.bfloat16), half=half, norms=norms, interleaved=interleaved
    )
    q, pages = gpu.run(
        qkv,
        inputs.pages,
        inputs.rows,
        rotation=rotation,
        norms=head_norms,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    plain = jax.jit(KVPages.write)(inputs.pages, inputs.k_new, inputs.v_new, inputs.rows)
    pairs = ((q, inputs.q), (pages.keys, plain.keys), (pages.values, plain.values))
    for got, want in pairs:
        got, want = (np.asarray(each).astype(np.float32) for each in (got, want))
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-6)  # NaN where it was
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


@pytest.mark.parametrize(
    ("half", "interleaved", "reason"),
    [(12, False, "multiple of 8"), (18, True, "multiple of 4")],
)
def test_kernel_says_what_it_cannot_serve(half: int, interleaved: bool, reason: str) -> None:
    case = Case(((1, 3),), page_size=64, head_dim=64)
    qkv, rotation, _, inputs = raw_product(
        case, make(case, jnp.bfloat16), half=half, norms=False, interleaved=interleaved
    )
    with pytest.raises(dispatch.UnsupportedShape, match=reason):
        rope_write(qkv, inputs.pages, inputs.rows, rotation=rotation, implementation="gpu")


@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 64), (1, 128), (1, 256), (2, 256), (4, 256)])
@pytest.mark.timeout(60)  # Mosaic can search for layouts without end
def test_few_wide_heads_lower_for_cuda_or_are_left_to_others(kv_heads: int, dim: int) -> None:
    case = Case(((1, 3), (2, 9)), heads=kv_heads, kv_heads=kv_heads, page_size=64, head_dim=dim)
    qkv, rotation, norms, inputs = raw_product(
        case, make(case, jnp.bfloat16), half=dim // 2, norms=True
    )
    args = (qkv, inputs.pages, inputs.rows)
    left = dim == 256 and kv_heads < 4 and jax.__version_info__ >= (0, 12)
    with dispatch.lowering_for("cuda"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = jax.jit(lambda *a: rope_write(*a, rotation=rotation, norms=norms))
        text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) != left
    assert all("heads of 256" in str(each.message) for each in said)


def test_shapes_that_do_not_fit_are_named() -> None:
    case = Case(((1, 3),))
    qkv, rotation, norms, inputs = raw_product(case, make(case, np.float32), half=4, norms=True)
    with pytest.raises(ValueError, match="qkv must be"):
        rope_write(qkv[:, :1], inputs.pages, inputs.rows)
    with pytest.raises(ValueError, match="cos and sin must be"):
        rope_write(qkv[1:], inputs.pages, inputs.rows, rotation=rotation)
    odd = HeadNorms(norms.keys[1:], norms.keys, eps=0.0)
    with pytest.raises(ValueError, match="queries must be"):
        rope_write(qkv, inputs.pages, inputs.rows, norms=odd)
