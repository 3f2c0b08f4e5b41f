"""Layers of a few tokens, chained: from one layer's attention to the next one's in one kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeGuard

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


class Stream(NamedTuple):
    """What a layer is given by the one before. fused [tokens, fused]: its own first product, None
    behind the last layer; state: the chain's.
    """

    x: Float[Array, "tokens model"]
    fused: Any
    state: Int[Array, " state"]


class Operations(NamedTuple):
    """Of a kind of layer: whether `attend` runs a kernel; the chain that attention begins; the
    chain alone.
    """

    attends: Callable[..., bool]
    attend: Callable[..., Any]
    chain: Callable[..., Any]


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
    return run_links(links, Stream(x, fused, chain_state()), calls, _step)


def _step(
    one: Link, following: Link | None, stream: Stream, call: Call
) -> tuple[Stream, LayerPages]:
    operations = Operations(attends, attend_chain, layer_chain)
    options = {"eps": one.mlp_norm.eps, "activation": one.activation}
    return advance(operations, one.attention, one.weights(following), stream, call, **options)


def run_links[L](
    links: Sequence[L],
    stream: Stream,
    calls: Sequence[Call],
    step: Callable[[L, L | None, Stream, Call], tuple[Stream, LayerPages]],
) -> tuple[list[Float[Array, "tokens model"]], list[LayerPages]]:
    """What each layer gives. step: from what a layer is given to what the next one is, and the
    layer's pages.
    """
    seen, written = [], []
    for one, following, call in zip(links, [*links[1:], None], calls, strict=True):
        stream, pages = step(one, following, stream, call)
        seen.append(stream.x)
        written.append(pages)
    return seen, written


def advance(
    operations: Operations,
    attention: Any,  # noqa: ANN401
    weights: Any,  # noqa: ANN401
    stream: Stream,
    call: Call,
    *,
    eps: float,
    **chain: Any,  # noqa: ANN401
) -> tuple[Stream, LayerPages]:
    """A step of `run_links` for a layer whose chain has these weights and options: short contexts
    attend where it begins, others in kernels of their own.
    """
    x, fused, state = stream
    rotary, pages, rows = call
    options = attention.plain_options(rotary) if isinstance(attention, Attention) else None
    inputs = fused, x, weights, pages, rows
    if options is not None and operations.attends(*inputs, attention=options, **chain):
        x, fused, pages, state = operations.attend(
            *inputs, state, attention=options, eps=eps, **chain
        )
    else:
        attended, pages = attention.attended(fused, *call)
        x, fused, state = operations.chain(attended, x, weights, state, eps=eps, **chain)
    return Stream(x, fused, state), pages
