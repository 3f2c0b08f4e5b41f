"""Ragged attention over latent pages: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)
in its absorbed form, where all heads share one key, a part of which is the value.
"""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.latent_attention.checks import LatentProblem, check
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows

_OPERATION = Operation(
    name="latent_attention",
    modules={
        "reference": "pallas_kernels.latent_attention.reference",
        "portable": "pallas_kernels.latent_attention.portable",
        "gpu": "pallas_kernels.latent_attention.gpu",
        "tpu": "pallas_kernels.latent_attention.tpu",
    },
    kernels={"cuda": ("gpu",), "tpu": ("tpu",)},
    fallback="portable",
)


def latent_attention(
    q: Float[Array, "tokens heads width"],
    new: Float[Array, "tokens width"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    latent: int,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads latent"], LatentPages]:
    """Write the step's tokens into the pages, then attend causally. One layer, one shard's heads.

    The score of query position i and position j <= i is q.c_j * scale over the whole width, where
    c_j is what the pages hold of token j; its value is the first `latent` channels of c_j. Outputs
    of padding tokens are zeros, and padding touches no page. The pages are updated in place if the
    caller donates them.

    implementation: "reference", "portable" or a kernel's name; None chooses by platform. Raises
    ValueError for shapes that do not fit together, UnsupportedShape for a named implementation that
    cannot serve them.
    """
    problem = check(q, new, pages, rows, latent=latent)
    q, new = pages.fill(q), pages.fill(new)
    chosen = _OPERATION.choose(problem, implementation)
    return chosen.run(q, new, pages, rows, latent=latent, scale=scale)


def attend_latents(
    q: Float[Array, "tokens heads width"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    latent: int,
    scale: float,
) -> Float[Array, "tokens heads latent"]:
    """As latent_attention, over pages that hold the step's tokens already."""
    problem = check(q, q[:, 0], pages, rows, latent=latent)
    return _OPERATION.choose(problem).attend(q, pages, rows, latent=latent, scale=scale)


__all__ = ["LatentProblem", "attend_latents", "latent_attention"]
