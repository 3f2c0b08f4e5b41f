"""Qwen: the pre-norm decoder, with two remedies for sequences beyond the trained length."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxgen_models.decoder import Decoder
from jaxgen_models.layers.rotary import Rotary, rotary
from jaxgen_models.qwen.config import QwenConfig
from jaxgen_models.rope_config import RopeConfig


class QWenLMHeadModel(Decoder):
    """Dynamic NTK by the length of the prompt, kept while the answer grows, and logn attention."""

    def __init__(
        self,
        config: QwenConfig,
        weights: Mapping[str, Any],
        group: int,
        cache_groups: Sequence[int],
    ) -> None:
        super().__init__(config, weights, group, cache_groups)
        self.trained_context = config.trained_context
        self.dynamic_ntk = config.dynamic_ntk
        self.logn = config.logn

    def rotation(
        self, rope: RopeConfig, positions: Int[Array, " tokens"], anchors: Int[Array, " tokens"]
    ) -> Rotary:
        turning = rotary(rope, positions, positions)
        if self.dynamic_ntk:
            angles = positions.astype(jnp.float32)[:, None] * self._stretched(rope, anchors)
            turning = Rotary(jnp.cos(angles), jnp.sin(angles))
        if not self.logn:
            return turning
        growth = jnp.log((positions + 1).astype(jnp.float32)) / np.log(self.trained_context)
        return replace(turning, query_scale=jnp.maximum(growth, 1.0))

    def _stretched(
        self, rope: RopeConfig, anchors: Int[Array, " tokens"]
    ) -> Float[Array, "tokens half"]:
        """Frequencies by prompt length: alpha is 1 up to the trained length, 3 up to twice that, 7
        up to four times, and so on.
        """
        doublings = np.arange(32 - self.trained_context.bit_length(), dtype=np.int32)
        passed = anchors[:, None] > (self.trained_context << doublings)
        alpha = 2.0 ** (passed.sum(axis=1) + 1) - 1
        base = rope.theta * alpha ** (rope.dim / (rope.dim - 2))
        exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
        return 1.0 / base[:, None] ** exponents
