"""The implementations in plain JAX conform, update pages in place, and refuse what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.pages import RaggedRows, abstract_kv_pages
from pallas_kernels.ragged_attention import ragged_attention
from tests.kernels.ragged_attention.conformance import CASES, Case, assert_conforms, make

# Plain JAX does not care about the width of a head; the kernels do.
PLAIN = [name for name in CASES if not name.startswith("head_")]


@pytest.mark.newest
@pytest.mark.parametrize("implementation", ["reference", "portable"])
@pytest.mark.parametrize("name", PLAIN)
def test_conforms(name: str, implementation: str) -> None:
    assert_conforms(CASES[name], implementation)


@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_conforms_in_bfloat16(implementation: str) -> None:
    assert_conforms(CASES["mixed"], implementation, dtype=jnp.bfloat16, tolerance=1e-2)


@pytest.mark.parametrize("tokens", [1, 4, 64], ids=["one", "decode", "prefill"])
def test_donated_pages_are_updated_in_place(tokens: int) -> None:
    pages = abstract_kv_pages(777, page_size=16, kv_heads=2, head_dim=32, dtype=jnp.float32)
    rows = RaggedRows(
        *(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((min(tokens, 4),),) * 3 + ((4, 9), ()))
    )
    if tokens == 1:
        rows = RaggedRows(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1,),) * 3 + ((1, 9), ())))
    q, new = (jax.ShapeDtypeStruct((tokens, h, 32), jnp.float32) for h in (4, 2))

    def two_layers(layers, q, k, v, rows):
        out = []
        for layer in layers:
            q, layer = ragged_attention(q, k, v, layer, rows, scale=0.1)
            out.append(layer)
        return q, out

    step = jax.jit(two_layers, donate_argnums=0)
    compiled = step.lower([pages, pages], q, new, new, rows).compile()
    bytes_of_pages = 4 * 777 * 2 * 16 * 32 * 4
    assert compiled.memory_analysis().alias_size_in_bytes == bytes_of_pages
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if "f32[777," in line and (" copy(" in line or " copy-start(" in line)
    ]
    assert copies == []


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    inputs = make(Case(((1, 3),)), np.float32)
    args = (inputs.q, inputs.k_new, inputs.v_new, inputs.pages, inputs.rows)
    with pytest.raises(ValueError, match="window must be at least 1"):
        ragged_attention(*args, scale=1.0, window=0)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
        ragged_attention(args[0][:, :3], *args[1:], scale=1.0)
    with pytest.raises(ValueError, match=r"has the implementations .*; got 'fast'"):
        ragged_attention(*args, scale=1.0, implementation="fast")


def test_a_setting_chooses_the_implementation() -> None:
    inputs = make(CASES["mixed"], np.float32)
    args = (inputs.q, inputs.k_new, inputs.v_new, inputs.pages, inputs.rows)

    def text() -> str:
        return str(jax.make_jaxpr(lambda *a: ragged_attention(*a, scale=1.0))(*args))

    plain = text()
    with dispatch.using(ragged_attention="reference"):
        assert text() != plain
    assert text() == plain


def test_a_platform_without_a_kernel_falls_back_with_one_warning() -> None:
    inputs = make(Case(((1, 3),), head_dim=24), np.float32)
    args = (inputs.q, inputs.k_new, inputs.v_new, inputs.pages, inputs.rows)
    with dispatch.lowering_for("rocm"), pytest.warns(dispatch.FallbackWarning, match="heads of 24"):
        ragged_attention(*args, scale=1.0)
    with dispatch.lowering_for("rocm"):  # warnings are errors here: the second call is silent
        ragged_attention(*args, scale=1.0)
