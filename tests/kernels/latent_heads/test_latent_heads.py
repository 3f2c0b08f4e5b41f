"""Queries and tokens made ready for latent attention: the Hopper kernel interpreted, where it is
chosen, what it refuses.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.latent_attention import attend_latents, latent_attention
from pallas_kernels.latent_heads import LatentNorm, can_make_heads, gpu, latent_heads
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows
from pallas_kernels.rope_write.heads import Rotation

PLAIN, ROTATED, LATENT, PAGE = 128, 64, 256, 64


@dataclass(frozen=True)
class Case:
    """tokens: each the newest of a row of its own; live: of them, the rest is padding."""

    tokens: int
    heads: int
    live: int
    interleaved: bool = True


def made(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    hidden = draw(case.tokens, case.heads * (PLAIN + ROTATED) + LATENT + ROTATED)
    angle = rng.uniform(0, 6, (case.tokens, ROTATED // 2)).astype(np.float32)
    rows = RaggedRows(
        starts=jnp.arange(case.tokens, dtype=jnp.int32),
        query_lengths=jnp.ones(case.tokens, jnp.int32),
        kv_lengths=jnp.asarray(rng.integers(1, PAGE, case.tokens), jnp.int32),
        block_table=jnp.asarray(rng.permutation(case.tokens)[:, None], jnp.int32),
        num_rows=jnp.asarray(case.live, jnp.int32),
    )
    return {
        "queries": hidden,
        "token": hidden,
        "up": draw(case.heads, PLAIN + 128, LATENT) * 0.1,
        "pages": LatentPages(draw(case.tokens, PAGE, LATENT + ROTATED)),
        "rows": rows,
        "plain": PLAIN,
        "norm": LatentNorm(draw(LATENT), 1e-6),
        "rotation": Rotation(jnp.cos(angle), jnp.sin(angle), case.interleaved),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Case(tokens=3, heads=2, live=2), Case(8, 1, 8, interleaved=False)],
    ids=str,
)
def test_kernel_makes_what_plain_jax_makes(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    inputs = made(case)
    want, written = latent_heads(**inputs, implementation="portable")
    got, pages = gpu.run(**inputs, interpret=plgpu.InterpretGPUParams(detect_races=True))
    pairs = ((got[: case.live], want[: case.live]), (pages.latents, written.latents))
    for one, other in pairs:
        one, other = (np.asarray(each).astype(np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=3e-2)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


def test_attention_goes_on_with_what_was_made() -> None:
    inputs = made(Case(tokens=3, heads=2, live=3))
    rows, before, plain = inputs["rows"], inputs["pages"], inputs.pop("plain")
    make = jax.jit(partial(latent_heads, plain=plain, implementation="portable"))
    queries, pages = make(**inputs)
    slots = partial(RaggedRows.token_slots, page_size=PAGE, num_pages=before.num_pages)
    new = pages.latents[jax.jit(slots, static_argnums=1)(rows, 3)]
    options = {"latent": LATENT, "scale": 0.1}
    want, _ = jax.jit(partial(latent_attention, **options))(queries, new, before, rows)
    got = jax.jit(partial(attend_latents, **options))(queries, pages, rows)
    np.testing.assert_array_equal(got, want)


def test_chosen_for_cuda_and_lowered() -> None:
    inputs = made(Case(tokens=3, heads=2, live=3))
    sizes = {name: inputs[name] for name in ("queries", "up", "pages")}
    assert not can_make_heads(**sizes, plain=PLAIN)
    with dispatch.lowering_for("cuda"):
        assert can_make_heads(**sizes, plain=PLAIN)
        fixed = {name: inputs.pop(name) for name in ("plain",)}
        traced = jax.jit(partial(latent_heads, **fixed)).trace(**inputs)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("tokens", "plain", "reason"), [(65, 128, "more than 64 tokens"), (8, 64, "128 \\+ 64 wide")]
)
def test_says_what_it_cannot_serve(tokens: int, plain: int, reason: str) -> None:
    inputs: dict[str, Any] = made(Case(tokens=tokens, heads=1, live=tokens))
    inputs["plain"] = plain
    with pytest.raises(dispatch.UnsupportedShape, match=reason):
        latent_heads(**inputs, implementation="gpu")
