"""Layers of a few tokens, chained: from one layer's attention to the next one's in one kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import jax
from jaxtyping import Array, Float, Int

from jaxgen_models.cache import LayerPages
from jaxgen_models.layers.attention import Attention
from jaxgen_models.layers.collective import TENSOR_AXIS
from jaxgen_models.layers.mlp import GatedMLP
from jaxgen_models.layers.norm import RMSNorm
from jaxgen_models.layers.rotary import Rotary
from pallas_kernels.attend_chain import attend_chain, has_kernel as attends
from pallas_kernels.layer_chain import ChainWeights, chain_state, has_kernel, layer_chain
from pallas_kernels.pages import RaggedRows

type Call = tuple[Rotary | None, LayerPages, RaggedRows]

ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Link:
    """A plain layer's parts: x + attention(attention_norm(x)), then x + mlp(mlp_norm(x))."""

    attention: Attention
    attention_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def weights(self, following: "Link | None") -> ChainWeights:
        """From this layer's attention to the following one's."""
        out, qkv, bias, ahead = self.attention.out[...], None, None, None
        if following is not None:
            ahead = following.attention.out[...]  # memory is idle while few rows attend
            qkv = following.attention.qkv[...]
            qkv = qkv.reshape(-1, qkv.shape[-1])
            if following.attention.qkv_bias is not None:
                bias = following.attention.qkv_bias[...].reshape(-1)
        return ChainWeights(
            out=out.reshape(out.shape[0], -1),
            mlp_norm=self.mlp_norm.weight[...],
            gate_up=self.mlp.gate_up[...],
            down=self.mlp.down[...],
            next_norm=None if following is None else following.attention_norm.weight[...],
            qkv=qkv,
            qkv_bias=bias,
            ahead=ahead,
        )

    @property
    def activation(self) -> str:
        """As the operation calls it."""
        return ACTIVATIONS[self.mlp.activation]


def link(attention: object, attention_norm: object, mlp_norm: object, mlp: object) -> Link | None:
    """The parts of a layer, or None if one of them computes what the chain does not know."""
    if type(attention) is not Attention or type(mlp) is not GatedMLP:
        return None
    if type(attention_norm) is not RMSNorm or type(mlp_norm) is not RMSNorm:
        return None
    plain = attention.out_bias is None and mlp.gate_up_bias is None and mlp.down_bias is None
    if not plain or attention_norm.eps != mlp_norm.eps or mlp.activation not in ACTIVATIONS:
        return None
    return Link(attention, attention_norm, mlp_norm, mlp)


def can_chain(
    links: Sequence[Link | None], x: Float[Array, "tokens model"]
) -> TypeGuard[Sequence[Link]]:
    """Whether all layers are plain, whole on this device, and served by a kernel."""
    known = [one for one in links if one is not None]
    if len(known) < len(links) or jax.lax.axis_size(TENSOR_AXIS) > 1:
        return False
    return all(
        has_kernel(x, one.weights(following), one.activation)
        for one, following in zip(known, [*known[1:], None], strict=True)
    )


def run_chain(
    links: Sequence[Link], x: Float[Array, "tokens model"], calls: Sequence[Call]
) -> tuple[list[Float[Array, "tokens model"]], list[LayerPages]]:
    """What each layer gives, as if they were called one after the other."""
    first = links[0]
    fused = first.attention.fused_heads(first.attention_norm(x)).reshape(x.shape[0], -1)
    state = chain_state()
    seen, written = [], []
    for one, following, call in zip(links, [*links[1:], None], calls, strict=True):
        x, ahead, pages, state = _advance(one, following, fused, x, call, state)
        fused = fused if ahead is None else ahead
        seen.append(x)
        written.append(pages)
    return seen, written


def _advance(
    one: Link,
    following: Link | None,
    fused: Float[Array, "tokens fused"],
    x: Float[Array, "tokens model"],
    call: Call,
    state: Int[Array, "1"],
) -> tuple[
    Float[Array, "tokens model"], Float[Array, "tokens fused"] | None, LayerPages, Int[Array, "1"]
]:
    """From a layer's fused QKV to the next one's: x, that, the layer's pages, the chain's state.

    Short contexts attend where the chain begins, others in a kernel of their own.
    """
    attention, weights = one.attention, one.weights(following)
    rotary, pages, rows = call
    norm: dict[str, Any] = {"eps": one.mlp_norm.eps, "activation": one.activation}
    options = attention.plain_options(rotary)
    inputs = fused, x, weights, pages, rows
    if options is not None and attends(*inputs, activation=one.activation, **options):
        return attend_chain(*inputs, state, scale=attention.scale, **norm, **options)
    attended, pages = attention.attended(fused, rotary, pages, rows)
    x, ahead, state = layer_chain(attended, x, weights, state, **norm)
    return x, ahead, pages, state
