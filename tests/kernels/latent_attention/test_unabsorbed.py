"""From plain queries, absorbed and expanded rows together give what absorbed attention gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.latent_attention.unabsorbed import attend_unabsorbed, can_expand
from pallas_kernels.latent_pages import LatentPages, abstract_latent_pages
from pallas_kernels.pages import RaggedRows
from tests.kernels.latent_attention.conformance import Case, make

PLAIN, VALUE = 10, 12
LENGTHS = {
    "expanded alone": ((170, 170),),
    "absorbed alone": ((1, 40), (3, 3)),
    "both, and one that finds no room": ((165, 190), (1, 40), (0, 0), (200, 17000), (9, 9)),
}


@jax.jit
def absorbed(
    q: jax.Array, new: jax.Array, pages: LatentPages, rows: RaggedRows, up: jax.Array
) -> tuple[jax.Array, LatentPages]:
    """Values [tokens, heads, VALUE] by way of queries [tokens, heads, width], and the pages."""
    latents = jnp.einsum("thn,hnl->thl", q[..., :PLAIN], up[:, :PLAIN], precision="highest")
    wide = jnp.concatenate([latents, q[..., PLAIN:]], axis=-1)
    out, pages = latent_attention(wide, new, pages, rows, latent=up.shape[2], scale=0.2)
    return jnp.einsum("thl,hvl->thv", out, up[:, PLAIN:], precision="highest"), pages


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("expanded alone", marks=pytest.mark.newest),
        pytest.param("absorbed alone", marks=pytest.mark.newest),
        "both, and one that finds no room",
    ],
)
def test_agrees_with_absorbed_attention(name: str) -> None:
    case = Case(LENGTHS[name], heads=2, page_size=64)
    inputs = make(case, np.float32)
    turning, tokens = case.width - case.latent, inputs.q.shape[0]
    rng = np.random.default_rng(1)
    live = ~np.isnan(np.asarray(inputs.q)).any(axis=(1, 2), keepdims=True)
    q = rng.standard_normal((tokens, case.heads, PLAIN + turning)).astype(np.float32)
    q = jnp.asarray(np.where(live, q, np.nan))
    up = rng.standard_normal((case.heads, PLAIN + VALUE, case.latent)).astype(np.float32) * 0.2
    arguments = q, inputs.new, inputs.pages, inputs.rows, jnp.asarray(up)
    got, pages = jax.jit(partial(attend_unabsorbed, scale=0.2))(*arguments)
    want, wrote = absorbed(*arguments)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-4)
    np.testing.assert_array_equal(pages.latents, wrote.latents)


@pytest.mark.parametrize(
    ("tokens", "dim", "dtype", "expected"),
    [
        (1024, 192, "bfloat16", True),
        (512, 192, "bfloat16", False),
        (8, 192, "bfloat16", False),
        (1024, 160, "bfloat16", False),
        (1024, 192, "float32", False),
    ],
)
def test_is_for_prompts_where_kernels_serve(
    tokens: int, dim: int, dtype: str, expected: bool
) -> None:
    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pages = abstract_latent_pages(64, page_size=64, width=576, dtype=dtype)
    rows = RaggedRows(*[ints(8)] * 3, ints(8, 8), ints())
    q = jax.ShapeDtypeStruct((tokens, 16, dim), dtype)
    args = q, pages, rows

    def asked() -> bool:
        found = []
        jax.eval_shape(lambda *a: found.append(can_expand(*a, latent=512)), *args)
        return found[0]

    assert not asked()
    with dispatch.lowering_for("cuda"):
        assert asked() == expected
