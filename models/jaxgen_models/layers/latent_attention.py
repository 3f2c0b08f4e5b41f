"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): heads meet the cached latents
directly, absorbed, so that no key and no value is made of them; save for long prompts on GPUs.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.latent_config import LatentMoEConfig
from jaxgen_models.layers.collective import sum_shards
from jaxgen_models.layers.linear import project
from jaxgen_models.layers.norm import RMSNorm
from jaxgen_models.layers.rotary import Rotary
from pallas_kernels.latent_attention import attend_latents, latent_attention
from pallas_kernels.latent_attention.unabsorbed import attend_unabsorbed, can_expand
from pallas_kernels.latent_heads import LatentNorm, can_make_heads, latent_heads
from pallas_kernels.latent_pages import LatentPages
from pallas_kernels.pages import RaggedRows
from pallas_kernels.per_head import per_head

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
        hidden = project(x, self.first_weight())
        if self.in_bias is not None:
            bias = self.in_bias[...]
            hidden = hidden.at[:, hidden.shape[1] - bias.shape[0] :].add(bias)
        values, pages = self.attended(hidden, rotary, pages, rows)
        out = sum_shards(project(values, self.output_weight()))
        return (out if self.out_bias is None else out + self.out_bias[...]), pages

    @property
    def is_biased(self) -> bool:
        """Whether anything is added to its first or its last product."""
        return self.in_bias is not None or self.out_bias is not None

    def first_weight(self) -> Float[Array, "hidden model"]:
        """The weight of its first product."""
        return self.project_in[...]

    def output_weight(self) -> Float[Array, "model inner"]:
        """The weight of its last product."""
        weight = self.out[...]
        return weight.reshape(weight.shape[0], -1)

    def attended(
        self,
        hidden: Float[Array, "tokens hidden"],
        rotary: Rotary | None,
        pages: LatentPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens inner"], LatentPages]:
        """From its first product to what its last product is given."""
        queries, up = self._queries(hidden), self.latent_up[...]
        tokens, head = hidden.shape[0], self.plain + self.rotated
        q = queries[:, : up.shape[0] * head].reshape(tokens, -1, head)
        expands = can_expand(q, pages, rows, latent=self.latent)
        made = not expands and can_make_heads(queries, up, pages, plain=self.plain)
        if made and rotary is not None:
            values, pages = self._attend_made(queries, hidden, rotary, pages, rows)
            return values.reshape(tokens, -1), pages
        plain, turning = q[..., : self.plain], q[..., self.plain :]
        width = self.latent + self.rotated
        latent, key = hidden[:, -width : -self.rotated], hidden[:, None, -self.rotated :]
        if rotary is not None:
            turning, key = rotary(turning), rotary(key)
        new = jnp.concatenate([self.latent_norm(latent), key[:, 0]], axis=-1)
        if expands:
            q = jnp.concatenate([plain, turning], axis=-1)
            values, pages = attend_unabsorbed(q, new, pages, rows, up, scale=self.scale)
        else:
            absorbed = per_head("thn,hnl->thl", plain, up[:, : self.plain])
            out, pages = latent_attention(
                jnp.concatenate([absorbed, turning], axis=-1),
                new,
                pages,
                rows,
                latent=self.latent,
                scale=self.scale,
            )
            values = per_head("thl,hvl->thv", out, up[:, self.plain :])
        return values.reshape(tokens, -1), pages

    def _attend_made(
        self,
        queries: Float[Array, "tokens queries"],
        hidden: Float[Array, "tokens hidden"],
        rotary: Rotary,
        pages: LatentPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens heads value"], LatentPages]:
        """Values where one kernel makes all that attention needs."""
        up = self.latent_up[...]
        made, pages = latent_heads(
            queries,
            hidden,
            up,
            pages,
            rows,
            plain=self.plain,
            norm=LatentNorm(self.latent_norm.weight[...], _LATENT_EPS),
            rotation=rotary.rotation(),
        )
        out = attend_latents(made, pages, rows, latent=self.latent, scale=self.scale)
        return per_head("thl,hvl->thv", out, up[:, self.plain :]), pages

    def _queries(self, hidden: Float[Array, "tokens hidden"]) -> Float[Array, "tokens queries"]:
        """What begins with the queries of all heads."""
        if self.q_norm is None or self.q_up is None:
            return hidden
        up = self.q_up[...]
        narrow = hidden[:, : -self.latent - self.rotated]
        return project(self.q_norm(narrow), up.reshape(-1, up.shape[-1]))


def _optional(weights: Mapping[str, Any], name: str) -> nnx.Param | None:
    return nnx.Param(weights[name]) if name in weights else None
