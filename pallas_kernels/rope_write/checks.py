"""What turning and writing heads relies on: shapes agree, or ValueError says what does not."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.pages import KVPages
from pallas_kernels.rope_write.heads import HeadNorms, Rotation


@dataclass(frozen=True, slots=True)
class TurnProblem:
    """The static facts of one call. half: of the channels that turn, 0 where none do."""

    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dtype: np.dtype
    page_dtype: np.dtype
    half: int
    interleaved: bool
    norms: bool

    def __str__(self) -> str:
        turning = f"{2 * self.half} channels turning" if self.half else ""
        extras = [turning, "interleaved" if self.interleaved else "", "norms" if self.norms else ""]
        return ", ".join(
            [
                f"{self.tokens} tokens of {self.kv_heads} x ({self.group} + 2) heads of "
                f"{self.head_dim}",
                f"pages of {self.page_size}",
                f"{self.dtype} with {self.page_dtype} pages",
                *filter(None, extras),
            ]
        )


def check(
    qkv: Float[Array, "tokens kv_heads places head"],
    pages: KVPages,
    rotation: Rotation | None,
    norms: HeadNorms | None,
) -> TurnProblem:
    """The problem, or ValueError naming the argument, what was expected and what came."""
    tokens, kv_heads, places, head_dim = qkv.shape
    if (kv_heads, head_dim) != (pages.kv_heads, pages.head_dim) or places < 3:
        raise ValueError(
            f"qkv must be [tokens, {pages.kv_heads}, group + 2, {pages.head_dim}] to fit the "
            f"pages, with a group of at least 1, got {qkv.shape}."
        )
    half = 0
    if rotation is not None:
        half = rotation.cos.shape[-1]
        if rotation.cos.shape != (tokens, half) or rotation.sin.shape != (tokens, half):
            raise ValueError(
                f"rotation.cos and sin must be ({tokens}, half), got {rotation.cos.shape} and "
                f"{rotation.sin.shape}."
            )
        if 2 * half > head_dim:
            raise ValueError(f"{2 * half} channels cannot turn in heads of {head_dim}.")
    for name in ("queries", "keys") if norms is not None else ():
        if getattr(norms, name).shape != (head_dim,):
            got = getattr(norms, name).shape
            raise ValueError(f"norms.{name} must be ({head_dim},), got {got}.")
    return TurnProblem(
        tokens=tokens,
        kv_heads=kv_heads,
        group=places - 2,
        head_dim=head_dim,
        page_size=pages.page_size,
        dtype=jnp.dtype(qkv.dtype),
        page_dtype=jnp.dtype(pages.keys.dtype),
        half=half,
        interleaved=rotation is not None and rotation.interleaved,
        norms=norms is not None,
    )
