"""Attention from the raw product: plain implementations, and who chooses the kernels."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.pages import KVPages, RaggedRows, abstract_kv_pages
from pallas_kernels.qkv_attention import has_kernel, qkv_attention
from pallas_kernels.rope_write import Rotation
from tests.kernels.qkv_attention.raw import raw_product
from tests.kernels.ragged_attention.conformance import Case, make, oracle


@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_plain_implementations_turn_write_and_attend(implementation: str) -> None:
    case = Case(((1, 20), (5, 5), (0, 0), (7, 30)), heads=9, kv_heads=3)
    qkv, rotation, norms, inputs = raw_product(
        case, make(case, np.float32), half=6, norms=True, interleaved=True
    )
    scale = case.head_dim**-0.5
    run = jax.jit(partial(qkv_attention, scale=scale, implementation=implementation))
    out, pages = run(qkv, inputs.pages, inputs.rows, rotation=rotation, norms=norms)
    np.testing.assert_allclose(out, oracle(case, inputs, scale), atol=1e-5, rtol=1e-5)
    plain = jax.jit(KVPages.write)(inputs.pages, inputs.k_new, inputs.v_new, inputs.rows)
    for got, want in ((pages.keys, plain.keys), (pages.values, plain.values)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # NaN where it was


def _abstract(tokens: int, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pages = abstract_kv_pages(64, page_size=64, kv_heads=2, head_dim=128, dtype=dtype)
    rows = RaggedRows(*[ints(8)] * 3, ints(8, 8), ints())
    angles = jax.ShapeDtypeStruct((tokens, 64), jnp.float32)
    return jax.ShapeDtypeStruct((tokens, 2, 6, 128), dtype), pages, rows, Rotation(angles, angles)


@pytest.mark.parametrize(("tokens", "kernels"), [(8, 2), (256, 3)], ids=["decode", "mixed"])
def test_lowers_for_cuda_to_few_kernels(tokens: int, kernels: int) -> None:
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
