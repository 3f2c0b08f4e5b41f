"""Grouped-query self-attention over paged keys and values."""

from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from jaxgen_models.alibi_config import AlibiConfig
from jaxgen_models.layers.alibi import local_alibi
from jaxgen_models.layers.collective import sum_shards
from jaxgen_models.layers.layer_norm import LayerNorm
from jaxgen_models.layers.linear import project
from jaxgen_models.layers.norm import OffsetRMSNorm, RMSNorm, WideRMSNorm
from jaxgen_models.layers.rotary import Rotary
from pallas_kernels.attend_chain import AttentionOptions
from pallas_kernels.pages import KVPages, RaggedRows
from pallas_kernels.qkv_attention import HeadNorms, has_kernel, qkv_attention
from pallas_kernels.ragged_attention import ragged_attention


def _is_per_head(norm: RMSNorm | LayerNorm) -> bool:
    """Whether it is an RMS norm of one head, with weights that all heads share."""
    if not isinstance(norm, RMSNorm) or type(norm) not in (RMSNorm, WideRMSNorm, OffsetRMSNorm):
        return False
    return norm.weight[...].ndim == 1


class Attention(nnx.Module):
    """Fused QKV product, optional per-head norms, optional rotation, paged attention, output.

    The heads are this shard's own: for each KV slot `group` query heads, its key head and its value
    head lie together, so that a shard of the first axis holds whole groups.

    weights: qkv [slots * (group + 2), head, model], out [model, slots * group, head], and where the
    config has them qkv_bias [slots * (group + 2), head], out_bias [model], q_norm and k_norm
    [head], or what the kind of norm asks for, and sinks [slots * group], logits that join each
    head's softmax and have no value.
    soft_cap: scores are capped to soft_cap * tanh(score / soft_cap).
    """

    norm_kind: ClassVar[type[RMSNorm] | type[LayerNorm]] = RMSNorm

    def __init__(
        self,
        weights: Mapping[str, Any],
        *,
        group: int,
        scale: float,
        window: int | None,
        norm_eps: float,
        soft_cap: float | None = None,
        alibi: AlibiConfig | None = None,
    ) -> None:
        self.qkv = nnx.Param(weights["qkv"])
        self.out = nnx.Param(weights["out"])
        self.qkv_bias = nnx.Param(weights["qkv_bias"]) if "qkv_bias" in weights else None
        self.out_bias = nnx.Param(weights["out_bias"]) if "out_bias" in weights else None
        self.q_norm = (
            self.norm_kind.of(weights, "q_norm", norm_eps) if "q_norm" in weights else None
        )
        self.k_norm = (
            self.norm_kind.of(weights, "k_norm", norm_eps) if "k_norm" in weights else None
        )
        self.sinks = nnx.Param(weights["sinks"]) if "sinks" in weights else None
        self.group = group
        self.scale = scale
        self.window = window
        self.soft_cap = soft_cap
        self.alibi = alibi

    def __call__(
        self,
        x: Float[Array, "tokens model"],
        rotary: Rotary | None,
        pages: KVPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens model"], KVPages]:
        out, pages = self.attend(self.fused_heads(x), rotary, pages, rows)
        out = sum_shards(project(out.reshape(x.shape[0], -1), self.output_weight()))
        return (out if self.out_bias is None else out + self.out_bias[...]), pages

    @property
    def is_biased(self) -> bool:
        """Whether anything is added to its first or its last product."""
        return self.qkv_bias is not None or self.out_bias is not None

    def first_weight(self) -> Float[Array, "fused model"]:
        """The weight of its first product, of all heads."""
        weight = self.qkv[...]
        return weight.reshape(-1, weight.shape[-1])

    def output_weight(self) -> Float[Array, "model inner"]:
        """The weight of its last product."""
        weight = self.out[...]
        return weight.reshape(weight.shape[0], -1)

    def attended(
        self,
        fused: Float[Array, "tokens fused"],
        rotary: Rotary | None,
        pages: KVPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens inner"], KVPages]:
        """From its first product, without biases, to what its last product is given."""
        tokens = fused.shape[0]
        heads = fused.reshape(tokens, -1, self.group + 2, self.qkv.shape[1])
        out, pages = self.attend(heads, rotary, pages, rows)
        return out.reshape(tokens, -1), pages

    def _alibi(
        self, alibi: AlibiConfig, pages: KVPages, rows: RaggedRows
    ) -> Float[Array, "heads ..."]:
        return local_alibi(alibi, rows.block_table.shape[1] * pages.page_size)

    def attend(
        self,
        qkv: Float[Array, "tokens slots places head"],
        rotary: Rotary | None,
        pages: KVPages,
        rows: RaggedRows,
    ) -> tuple[Float[Array, "tokens heads head"], KVPages]:
        """From `fused_heads` to what every query head gathers, and the pages with the new tokens.

        One kernel turns, writes and attends where there is one.
        """
        options = self._options()
        options["alibi"] = None if self.alibi is None else self._alibi(self.alibi, pages, rows)
        if self._turns_plainly(rotary):
            turning = self._turning(rotary)
            if has_kernel(qkv, pages, rows, **turning, **options):
                return qkv_attention(qkv, pages, rows, scale=self.scale, **turning, **options)
        q, k, v = self._heads(qkv)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        return ragged_attention(
            q if rotary is None else rotary.queries(q),
            k if rotary is None else rotary(k),
            v,
            pages,
            rows,
            scale=self.scale,
            **options,
        )

    def plain_options(self, rotary: Rotary | None) -> AttentionOptions | None:
        """How heads turn and attend, in the words of the kernels; None where they cannot say it."""
        if self.alibi is not None or not self._turns_plainly(rotary):
            return None
        return AttentionOptions(self.scale, **self._turning(rotary), **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "soft_cap": self.soft_cap,
            "sinks": None if self.sinks is None else self.sinks[...],
        }

    def _turning(self, rotary: Rotary | None) -> dict[str, Any]:
        return {
            "rotation": None if rotary is None else rotary.rotation(),
            "norms": self._norms(),
        }

    def _turns_plainly(self, rotary: Rotary | None) -> bool:
        """Whether heads have no scales of their own, and no norms but RMS norms that all share:
        what the kernels know.
        """
        if rotary is not None and rotary.query_scale is not None:
            return False
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        return len(norms) != 1 and all(map(_is_per_head, norms))

    def _norms(self) -> HeadNorms | None:
        q_norm, k_norm = self.q_norm, self.k_norm
        if not isinstance(q_norm, RMSNorm) or not isinstance(k_norm, RMSNorm):
            return None
        return HeadNorms(
            q_norm.weight[...],
            k_norm.weight[...],
            eps=q_norm.eps,
            offset=float(isinstance(q_norm, OffsetRMSNorm)),
        )

    def fused_heads(
        self, x: Float[Array, "tokens model"]
    ) -> Float[Array, "tokens slots places head"]:
        """[tokens, slots, group + 2, head]: of each KV slot its queries, its key, its value."""
        weight = self.qkv[...]
        rows, head, model = weight.shape
        fused = project(x, weight.reshape(rows * head, model)).reshape(-1, rows, head)
        if self.qkv_bias is not None:
            fused = fused + self.qkv_bias[...]
        return fused.reshape(fused.shape[0], -1, self.group + 2, head)

    def _heads(self, slots: Float[Array, "tokens slots places head"]) -> tuple[Array, Array, Array]:
        """Queries [tokens, slots * group, head], keys and values [tokens, slots, head]."""
        queries = slots[:, :, : self.group].reshape(slots.shape[0], -1, slots.shape[-1])
        return queries, slots[:, :, self.group], slots[:, :, self.group + 1]
