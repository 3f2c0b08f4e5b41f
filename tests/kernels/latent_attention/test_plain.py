"""The implementations in plain JAX conform, update pages in place, and refuse what does not fit."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.latent_pages import abstract_latent_pages
from pallas_kernels.pages import RaggedRows
from tests.kernels.latent_attention.conformance import CASES, Case, assert_conforms, make


@pytest.mark.newest
@pytest.mark.parametrize("implementation", ["reference", "portable"])
@pytest.mark.parametrize("name", CASES)
def test_conforms(name: str, implementation: str) -> None:
    assert_conforms(CASES[name], implementation)


@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_conforms_in_bfloat16(implementation: str) -> None:
    assert_conforms(CASES["mixed"], implementation, dtype=jnp.bfloat16, tolerance=1e-2)


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_the_wide_plan_of_accelerators_conforms(name: str) -> None:
    with dispatch.lowering_for("cuda"):
        assert_conforms(CASES[name], "portable")


@pytest.mark.parametrize("tokens", [1, 4, 64], ids=["one", "decode", "prefill"])
def test_donated_pages_are_updated_in_place(tokens: int) -> None:
    pages = abstract_latent_pages(777, page_size=16, width=40, dtype=jnp.float32)
    count = min(tokens, 4)
    shapes = (*((count,),) * 3, (count, 9), ())
    rows = RaggedRows(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))
    q = jax.ShapeDtypeStruct((tokens, 4, 40), jnp.float32)
    new = jax.ShapeDtypeStruct((tokens, 40), jnp.float32)

    def step(pages, q, new, rows):
        return latent_attention(q, new, pages, rows, latent=32, scale=0.1)

    compiled = jax.jit(step, donate_argnums=0).lower(pages, q, new, rows).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 777 * 16 * 40 * 4
    lines = compiled.as_text().splitlines()
    assert not [line for line in lines if "f32[777," in line and " copy(" in line]


def test_a_latent_wider_than_the_pages_is_refused() -> None:
    inputs = make(Case(((1, 3),)), jnp.float32)
    with pytest.raises(ValueError, match="latent must lie between 1 and the width, 32, got 33"):
        latent_attention(inputs.q, inputs.new, inputs.pages, inputs.rows, latent=33, scale=1.0)
