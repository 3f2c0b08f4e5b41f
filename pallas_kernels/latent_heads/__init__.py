"""What latent attention needs before it can begin: queries that meet the cached latents, and the
step's tokens in the pages.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Operation
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows
from pallas_kernels.rope_write.heads import Leaf, Rotation

_OPERATION = Operation(
    name="latent_heads",
    modules={
        "portable": "pallas_kernels.latent_heads.portable",
        "gpu": "pallas_kernels.latent_heads.gpu",
    },
    kernels={"cuda": ("gpu",)},
    fallback="portable",
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LatentNorm:
    """The root-mean-square norm of a token's latent: x / rms(x) * weight."""

    weight: Leaf
    eps: float = field(metadata={"static": True})


@dataclass(frozen=True, slots=True)
class LatentHeadsProblem:
    """The static facts of one call: channels of a head that do not turn, and that turn."""

    tokens: int
    heads: int
    plain: int
    rotated: int
    latent: int
    page_width: int
    dtype: np.dtype
    page_dtype: np.dtype

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens of {self.heads} heads of {self.plain} + {self.rotated} over a "
            f"latent of {self.latent}, {self.dtype} with {self.page_dtype} pages"
        )


def latent_heads(
    queries: Float[Array, "tokens queries"],
    token: Float[Array, "tokens token"],
    up: Float[Array, "heads channels latent"],
    pages: LatentPages,
    rows: RaggedRows,
    *,
    plain: int,
    norm: LatentNorm,
    rotation: Rotation,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads width"], LatentPages]:
    """Absorbed queries, and the pages with the step's tokens in place.

    queries: begins with heads x (plain + rotated) channels; what follows is not looked at. token:
    ends with latent + rotated channels. up: the first `plain` channels of a head make its key from
    a latent: they are moved over to the query. A token's latent is normalised; the last `rotated`
    channels, of queries and token, turn. Padding touches no page.

    implementation: "portable" or a kernel's name; None chooses by platform. Raises ValueError for
    shapes that do not fit together, UnsupportedShape for a named implementation that cannot serve.
    """
    rotated, latent = 2 * rotation.cos.shape[-1], up.shape[2]
    problem = _problem(queries, up, pages, plain=plain)
    least = {"queries": up.shape[0] * (plain + rotated), "token": latent + rotated}
    for name, found in (("queries", queries), ("token", token)):
        if found.shape[0] != problem.tokens or found.shape[1] < least[name]:
            raise ValueError(
                f"{name} must be [{problem.tokens}, {least[name]} or more], got {found.shape}."
            )
    if up.shape[1] < plain or rotated != problem.rotated or not pages.holds(latent + rotated):
        raise ValueError(f"up {up.shape} and pages of {pages.width} channels do not fit {problem}.")
    run = _OPERATION.choose(problem, implementation).run
    return run(queries, token, up, pages, rows, plain=plain, norm=norm, rotation=rotation)


def can_make_heads(
    queries: Float[Array, "tokens queries"],
    up: Float[Array, "heads channels latent"],
    pages: LatentPages,
    *,
    plain: int,
) -> bool:
    """Whether a kernel of the target platform serves such a call."""
    return _OPERATION.has_kernel(_problem(queries, up, pages, plain=plain))


def _problem(
    queries: Float[Array, "tokens queries"],
    up: Float[Array, "heads channels latent"],
    pages: LatentPages,
    *,
    plain: int,
) -> LatentHeadsProblem:
    heads, _, latent = up.shape
    return LatentHeadsProblem(
        tokens=queries.shape[0],
        heads=heads,
        plain=plain,
        rotated=pages.width - latent,  # where pages hold nothing else, as kernels ask
        latent=latent,
        page_width=pages.width,
        dtype=jnp.dtype(queries.dtype),
        page_dtype=jnp.dtype(pages.latents.dtype),
    )


__all__ = ["LatentHeadsProblem", "LatentNorm", "can_make_heads", "latent_heads"]
