"""A tile of raw heads becomes normalised and rotated heads, in registers of one warpgroup."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_attention.gpu_softmax import ROWS, TILE, across, spread
from pallas_kernels.rope_write.heads import HeadNorms, Rotation


class Turn(NamedTuple):
    """What is fixed when a kernel is built: half of the turning channels (0: none), norms."""

    half: int
    eps: float | None
    offset: float

    @classmethod
    def of(cls, rotation: Rotation | None, norms: HeadNorms | None) -> "Turn":
        """What these ask for."""
        return cls(
            half=0 if rotation is None else rotation.cos.shape[1],
            eps=None if norms is None else norms.eps,
            offset=0.0 if norms is None else norms.offset,
        )


def operands(rotation: Rotation | None, norms: HeadNorms | None) -> dict[str, Any]:
    """The arrays that `turned` reads, by the names of its refs."""
    named = {}
    if rotation is not None:
        named |= {"cos": rotation.cos, "sin": rotation.sin}
    if norms is not None:
        named |= {"q_norm": norms.queries, "k_norm": norms.keys}
    return named


def prepared(turn: Turn, refs: Any, token: Any, head_dim: int) -> dict[str, jax.Array]:
    """What `turned` needs beside the heads, loaded ahead of them."""
    found = {}
    if turn.eps is not None:
        found |= {name: across(getattr(refs, name), head_dim) for name in ("q_norm", "k_norm")}
    if turn.half:
        angles = (("cos", refs.cos), ("sin", refs.sin))
        found |= {name: across(ref.at[token], turn.half) for name, ref in angles}
    return found


def turned(
    turn: Turn, raw: jax.Array, found: dict[str, jax.Array], group: int, heads: int
) -> jax.Array:
    """Rows of raw [ROWS, head] of one token: for each place in a group, so many heads. Queries, in
    the first `group` places, and keys, in the next, are normalised and turned; the rest stays.
    """
    if turn.eps is None and not turn.half:
        return raw
    head_dim = raw.shape[1]
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, head_dim), 0, layout=TILE)
    value = raw.astype(jnp.float32)
    if turn.eps is not None:
        mean = (value * value).sum(axis=1) * (1 / head_dim)
        weight = jnp.where(row < group * heads, found["q_norm"], found["k_norm"]) + turn.offset
        value = value * spread(lax.rsqrt(mean + turn.eps), head_dim) * weight
    if turn.half:
        half, cos, sin = turn.half, found["cos"], found["sin"]
        first, second = value[:, :half], value[:, half : 2 * half]
        parts = [first * cos - second * sin, second * cos + first * sin]
        if 2 * half < head_dim:
            parts.append(value[:, 2 * half :])
        value = jnp.concatenate(parts, axis=1)
    return jnp.where(row < (group + 1) * heads, value.astype(raw.dtype), raw)
