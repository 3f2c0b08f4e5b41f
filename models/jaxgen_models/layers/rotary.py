"""Rotary position embedding (Su et al., arXiv:2104.09864) with the scalings of the configs.

Angles are computed in the step from positions, in float32: no table bounds the context, and
`dynamic`, whose base depends on the length of a sequence, needs no state.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxgen_models.rope_config import RopeConfig
from pallas_kernels.rope_write import Rotation


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin of a step's tokens, float32, and which channels turn together."""

    cos: Float[Array, "tokens half"]
    sin: Float[Array, "tokens half"]
    interleaved: bool = field(default=False, metadata={"static": True})
    query_scale: Float[Array, " tokens"] | None = None

    def rotation(self) -> Rotation:
        """The same for the kernels that turn heads."""
        return Rotation(self.cos, self.sin, self.interleaved)

    def queries(self, x: Float[Array, "tokens heads head"]) -> Float[Array, "tokens heads head"]:
        """Rotates queries; where there is a query_scale, those of each token grow by it."""
        if self.query_scale is None:
            return self(x)
        return self(x) * self.query_scale[:, None, None].astype(x.dtype)

    def __call__(self, x: Float[Array, "tokens heads head"]) -> Float[Array, "tokens heads head"]:
        """Rotates the first 2*half channels of every head: channel i with channel i + half, or
        2i with 2i + 1 where they are interleaved.
        """
        half = self.cos.shape[-1]
        cos, sin = (t[:, None, :].astype(x.dtype) for t in (self.cos, self.sin))
        if self.interleaved:
            pairs = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
            first, second = pairs[..., 0], pairs[..., 1]
            turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
            return jnp.concatenate(
                [turned.reshape(*x.shape[:-1], 2 * half), x[..., 2 * half :]], axis=-1
            )
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate([*turned, rest], axis=-1)


def rotary(
    rope: RopeConfig, positions: Int[Array, " tokens"], lengths: Int[Array, " tokens"]
) -> Rotary:
    """The rotation of each token.

    lengths: for each token the length of its sequence when its key was first computed: of the whole
    prompt for prompt tokens, position + 1 for generated ones. `dynamic` looks at it: keys keep the
    frequencies of the time when they were written, as in transformers' cached generation. So does
    `longrope`, whose keys are computed anew when a sequence outgrows the shorter context.
    """
    if rope.kind == "dynamic":
        frequencies = _dynamic_frequencies(rope, lengths)
    elif rope.kind == "longrope":
        is_long = (lengths > rope.original_context)[:, None]
        frequencies = jnp.where(
            is_long, _longrope(rope, rope.long_factors), _longrope(rope, rope.short_factors)
        )
    else:
        frequencies = jnp.asarray(_static_frequencies(rope))[None, :]
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return Rotary(
        jnp.cos(angles) * rope.attention_factor,
        jnp.sin(angles) * rope.attention_factor,
        rope.interleaved,
    )


def _exponents(rope: RopeConfig) -> np.ndarray:
    return np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)


def _powers(rope: RopeConfig) -> np.ndarray:
    """theta to the power of each channel's exponent: the nearest float32, as in torch.

    numpy's own float32 power misses it in one of ten channels by a unit in the last place, which
    turns them by 0.01 at position 100,000.
    """
    exact = np.float64(np.float32(rope.theta)) ** _exponents(rope).astype(np.float64)
    return exact.astype(np.float32)


def _static_frequencies(rope: RopeConfig) -> np.ndarray:
    plain = np.float32(1) / _powers(rope)
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope)
    return plain


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / plain
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = np.where(wavelength > longest, plain / rope.factor, plain)
    is_between = (wavelength >= shortest) & (wavelength <= longest)
    return np.where(is_between, between, stretched).astype(np.float32)


def _yarn(rope: RopeConfig) -> np.ndarray:
    """YaRN (arXiv:2309.00071) section 3.2: a ramp over channels between interpolation and none."""
    powers = _powers(rope)

    def channel(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    kept, one = np.float32(1) - ramp.astype(np.float32), np.float32(1)
    return one / (np.float32(rope.factor) * powers) * (one - kept) + one / powers * kept


def _longrope(rope: RopeConfig, factors: tuple[float, ...]) -> np.ndarray:
    """LongRoPE (arXiv:2402.13753): every frequency has a divisor of its own."""
    divisors = np.asarray(factors, np.float32)
    return np.float32(1) / (divisors * _powers(rope))


def _dynamic_frequencies(
    rope: RopeConfig, lengths: Int[Array, " tokens"]
) -> Float[Array, "tokens half"]:
    """Dynamic NTK: the base grows with the length of the sequence once that exceeds the trained
    one.
    """
    longest = jnp.maximum(lengths, rope.original_context).astype(jnp.float32)
    stretch = rope.factor * longest / rope.original_context - (rope.factor - 1)
    base = rope.theta * stretch ** (rope.dim / (rope.dim - 2))
    return 1.0 / base[:, None] ** jnp.asarray(_exponents(rope))[None, :]
