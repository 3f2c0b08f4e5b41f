"""A tile of raw heads becomes normalised and rotated heads, in registers of one warpgroup."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import vector

from pallas_kernels.ragged_attention.gpu_softmax import ROWS, TILE, across, spread
from pallas_kernels.rope_write.heads import HeadNorms, Rotation


class Turn(NamedTuple):
    """What is fixed when a kernel is built: half of the turning channels (0: none), whether those
    that turn together lie side by side, norms.
    """

    half: int
    interleaved: bool
    eps: float | None
    offset: float
    interpret: bool

    @classmethod
    def of(cls, rotation: Rotation | None, norms: HeadNorms | None, interpret: bool) -> "Turn":
        """What these ask for."""
        return cls(
            half=0 if rotation is None else rotation.cos.shape[1],
            interleaved=rotation is not None and rotation.interleaved,
            eps=None if norms is None else norms.eps,
            offset=0.0 if norms is None else norms.offset,
            interpret=interpret,
        )

    @property
    def angles(self) -> int:
        """Columns of the cosines and sines that the kernel reads."""
        return 2 * self.half if self.interleaved else self.half


def operands(rotation: Rotation | None, norms: HeadNorms | None) -> dict[str, Any]:
    """The arrays that `turned` reads, by the names of its refs."""
    named = {}
    if rotation is not None:
        cos, sin = rotation.cos, rotation.sin
        if rotation.interleaved:  # one of each for every channel, to go with its neighbour
            cos = jnp.stack([cos, cos], axis=2).reshape(cos.shape[0], -1)
            sin = jnp.stack([-sin, sin], axis=2).reshape(cos.shape)
        named |= {"cos": cos, "sin": sin}
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
        found |= {name: across(ref.at[token], turn.angles) for name, ref in angles}
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
        if turn.interleaved:
            turning = value if 2 * half == head_dim else value[:, : 2 * half]
            parts = [turning * cos + _neighbours(turning, turn.interpret) * sin]
        else:
            first, second = value[:, :half], value[:, half : 2 * half]
            parts = [first * cos - second * sin, second * cos + first * sin]
        if 2 * half < head_dim:
            parts.append(value[:, 2 * half :])
        value = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    return jnp.where(row < (group + 1) * heads, value.astype(raw.dtype), raw)


def _neighbours(value: jax.Array, interpret: bool) -> jax.Array:
    """Channels 2i and 2i + 1 of a float32 tile, the one in the other's place."""
    if interpret:
        pairs = value.reshape(value.shape[0], -1, 2)
        return jnp.concatenate([pairs[..., 1:], pairs[..., :1]], axis=-1).reshape(value.shape)

    @plgpu.inline_mgpu(
        arg_types=(TILE,),
        return_type=plgpu.ShapeDtypeStruct(value.shape, jnp.float32, layout=TILE),
    )
    def swap(ctx: Any, tile: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        del ctx
        registers = tile.registers.copy()  # each one holds two channels that lie side by side
        for place, pair in np.ndenumerate(tile.registers):
            registers[place] = vector.shuffle(pair, pair, [1, 0])
        return mgpu.FragmentedArray(
            _registers=registers, _layout=tile.layout, _is_signed=tile.is_signed
        )

    return swap(value)
