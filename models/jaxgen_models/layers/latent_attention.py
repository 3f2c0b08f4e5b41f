"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): heads meet the cached latents
directly, absorbed, so that no key and no value is made of them; save for long prompts on GPUs.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.latent_config import LatentMoEConfig
from jaxgen_models.layers.collective import sum_shards
from jaxgen_models.layers.linear import project
from jaxgen_models.layers.norm import RMSNorm
from jaxgen_models.layers.rotary import Rotary
from pallas_kernels.dispatch import target_platform
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.latent_attention.unabsorbed import attend_unabsorbed, can_expand
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows

_LATENT_EPS = 1e-6  # whatever the config says of the other norms


class LatentAttention(nnx.Module):
    """One product to the latents, queries, attention over the pages, values, output.

    The heads are this shard's own; the token's latent is the same on every shard.

    weights: latent_norm [latent], latent_up [heads, plain + value, latent], out
    [model, heads, value]; for queries without a latent direct_in, otherwise low_rank_in, q_norm
    [q_rank] and q_up [heads, plain + rotated, q_rank]; and biases where the config has them.
    """

    def __init__(self, weights: Mapping[str, Any], config: LatentMoEConfig) -> None:
        name = "direct_in" if config.direct_queries else "low_rank_in"
        self.project_in = nnx.Param(weights[name])
        self.in_bias = _optional(weights, f"{name}_bias")
        self.q_norm = RMSNorm(weights["q_norm"], _LATENT_EPS) if "q_norm" in weights else None
        self.q_up = _optional(weights, "q_up")
        self.latent_norm = RMSNorm(weights["latent_norm"], _LATENT_EPS)
        self.latent_up = nnx.Param(weights["latent_up"])
        self.out = nnx.Param(weights["out"])
        self.out_bias = _optional(weights, "out_bias")
        self.scale = config.attention_scale
        self.plain = int(config.plain_dim)
        self.rotated = int(config.head_dim)
        self.latent = int(config.latent_dim)

    def __call__(
        self,
        x: Float[Array, "tokens model"],
        rotary: Rotary | None,
        pages: LatentPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens model"], LatentPages]:
        q, latent, key = self._projected(x)
        plain, turning = q[..., : self.plain], q[..., self.plain :]
        key = key[:, None, :]
        if rotary is not None:
            turning, key = rotary(turning), rotary(key)
        new = jnp.concatenate([self.latent_norm(latent), key[:, 0]], axis=-1)
        up = self.latent_up[...]
        if can_expand(q, pages, rows, latent=self.latent):
            q = jnp.concatenate([plain, turning], axis=-1)
            values, pages = attend_unabsorbed(q, new, pages, rows, up, scale=self.scale)
        else:
            absorbed = _per_head("thn,hnl->thl", plain, up[:, : self.plain])
            out, pages = latent_attention(
                jnp.concatenate([absorbed, turning], axis=-1),
                new,
                pages,
                rows,
                latent=self.latent,
                scale=self.scale,
            )
            values = _per_head("thl,hvl->thv", out, up[:, self.plain :])
        weight = self.out[...]
        out = project(values.reshape(x.shape[0], -1), weight.reshape(weight.shape[0], -1))
        out = sum_shards(out)
        return (out if self.out_bias is None else out + self.out_bias[...]), pages

    def _projected(self, x: Float[Array, "tokens model"]) -> tuple[Array, Array, Array]:
        """Queries [tokens, heads, plain + rotated], latent [tokens, latent], key
        [tokens, rotated].
        """
        hidden = project(x, self.project_in[...])
        if self.in_bias is not None:
            bias = self.in_bias[...]
            hidden = hidden.at[:, hidden.shape[1] - bias.shape[0] :].add(bias)
        width = self.latent + self.rotated
        q, latent = hidden[:, :-width], hidden[:, -width:]
        if self.q_norm is not None and self.q_up is not None:
            up = self.q_up[...]
            q = project(self.q_norm(q), up.reshape(-1, up.shape[-1]))
        q = q.reshape(x.shape[0], -1, self.plain + self.rotated)
        return q, latent[:, : self.latent], latent[:, self.latent :]


def _per_head(equation: str, x: Array, weight: Array) -> Array:
    """A product per head, in x's dtype, accumulated in float32 as in `project`."""
    dtype = x.dtype
    if target_platform() == "cpu":
        # XLA has no batched product of narrow types there, and folds casts that nothing holds back.
        wide = x.astype(jnp.float32), weight.astype(jnp.float32)
        x, weight = jax.lax.optimization_barrier(wide)
    out = jnp.einsum(
        equation,
        x,
        weight,
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return out.astype(dtype)


def _optional(weights: Mapping[str, Any], name: str) -> nnx.Param | None:
    return nnx.Param(weights[name]) if name in weights else None
