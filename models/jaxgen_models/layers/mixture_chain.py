"""One token's layers with experts, chained: one kernel from a layer's attention to the next one, or
from its first product, where attention begins that kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeGuard

import jax
from jaxtyping import Array, Float, Int

from jaxgen_models.cache import LayerPages
from jaxgen_models.layers.attention import Attention
from jaxgen_models.layers.chain import (
    ACTIVATIONS,
    Call,
    Operations,
    Stream,
    advance,
    run_links,
)
from jaxgen_models.layers.collective import EXPERT_AXIS, TENSOR_AXIS
from jaxgen_models.layers.latent_attention import LatentAttention
from jaxgen_models.layers.linear import project
from jaxgen_models.layers.mlp import GatedMLP
from jaxgen_models.layers.moe import MoE
from jaxgen_models.layers.norm import RMSNorm
from pallas_kernels.attend_mixture import attend_mixture, has_kernel as attends
from pallas_kernels.mixture_chain import (
    MixtureWeights,
    has_kernel,
    mixture_chain,
    mixture_state,
)

_ROWS: Final = 1


@dataclass(frozen=True, slots=True)
class MixtureLink:
    """A layer's parts: x + attention(attention_norm(x)), then x + mlp(mlp_norm(x)); a dense MLP
    stands between the layers that are chained.
    """

    attention: Attention | LatentAttention
    attention_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: MoE | GatedMLP

    def first(self, x: Float[Array, "1 model"]) -> Float[Array, "1 fused"]:
        """The layer's first product."""
        return project(self.attention_norm(x), self.attention.first_weight())

    def dense(
        self, attended: Float[Array, "1 inner"], x: Float[Array, "1 model"]
    ) -> Float[Array, "1 model"]:
        """The rest of a layer without experts."""
        assert isinstance(self.mlp, GatedMLP)
        x = x + project(attended, self.attention.output_weight())
        return x + self.mlp(self.mlp_norm(x))

    def weights(self, following: "MixtureLink | None") -> MixtureWeights:
        """From this layer's attention to the following one's; of a layer with experts."""
        assert isinstance(self.mlp, MoE)
        shared, experts = self.mlp.shared, self.mlp.experts
        next_norm, product, ahead = None, None, None
        if following is not None:
            next_norm = following.attention_norm.weight[...]
            product = following.attention.first_weight()
            ahead = following.attention.output_weight()  # memory is idle while a row attends
        return MixtureWeights(
            out=self.attention.output_weight(),
            mlp_norm=self.mlp_norm.weight[...],
            router=self.mlp.router.weight[...],
            gate_up=experts.gate_up[...],
            down=experts.down[...],
            shared_gate_up=None if shared is None else shared.gate_up[...],
            shared_down=None if shared is None else shared.down[...],
            next_norm=next_norm,
            following=product,
            ahead=ahead,
        )

    @property
    def activation(self) -> str:
        """As the operation calls it."""
        assert isinstance(self.mlp, MoE)
        return ACTIVATIONS[self.mlp.activation]


def mixture_link(
    attention: object, attention_norm: object, mlp_norm: object, mlp: object
) -> MixtureLink | None:
    """The parts of a layer, or None if one of them computes what the chain does not know."""
    if type(attention) is not Attention and type(attention) is not LatentAttention:
        return None
    if type(attention_norm) is not RMSNorm or type(mlp_norm) is not RMSNorm:
        return None
    if attention.is_biased or attention_norm.eps != mlp_norm.eps:
        return None
    if type(mlp) is not GatedMLP and not (type(mlp) is MoE and mlp.is_plain):
        return None
    if isinstance(mlp, MoE) and mlp.activation not in ACTIVATIONS:
        return None
    return MixtureLink(attention, attention_norm, mlp_norm, mlp)


def can_chain_mixtures(
    links: Sequence[MixtureLink | None], x: Float[Array, "tokens model"]
) -> TypeGuard[Sequence[MixtureLink]]:
    """Whether the layers with experts are served by a kernel, whole on this device, one token."""
    if x.shape[0] != _ROWS or any(link is None for link in links):
        return False
    if jax.lax.axis_size(TENSOR_AXIS) > 1 or jax.lax.axis_size(EXPERT_AXIS) > 1:
        return False
    known = [link for link in links if link is not None]
    return all(
        has_kernel(x, one.weights(following), one.mlp.router.problem(_ROWS), one.activation)
        for one, following in zip(known, [*known[1:], None], strict=True)
        if isinstance(one.mlp, MoE)
    )


def run_mixtures(
    links: Sequence[MixtureLink], x: Float[Array, "1 model"], calls: Sequence[Call]
) -> tuple[list[Float[Array, "1 model"]], list[LayerPages]]:
    """What each layer gives, as if they were called one after the other."""
    stream = Stream(x, links[0].first(x), _state(links, x))
    return run_links(links, stream, calls, _step)


def _step(
    one: MixtureLink, following: MixtureLink | None, stream: Stream, call: Call
) -> tuple[Stream, LayerPages]:
    if isinstance(one.mlp, MoE):
        operations = Operations(attends, attend_mixture, mixture_chain)
        options = {"choice": one.mlp.router.problem(_ROWS), "activation": one.activation}
        layer = one.attention, one.weights(following), stream, call
        return advance(operations, *layer, eps=one.mlp_norm.eps, **options)
    attended, pages = one.attention.attended(stream.fused, *call)
    x = one.dense(attended, stream.x)
    ahead = None if following is None else following.first(x)
    return Stream(x, ahead, stream.state), pages


def _state(links: Sequence[MixtureLink], x: Float[Array, "1 model"]) -> Int[Array, " state"]:
    """Room for what any of these layers hands on."""
    mixtures = [(one, one.mlp) for one in links if isinstance(one.mlp, MoE)]
    experts = [mlp.router.problem(_ROWS).experts for _, mlp in mixtures]
    inner = [one.attention.output_weight().shape[1] for one, _ in mixtures]
    return mixture_state(x.shape[1], max(experts, default=0), max(inner, default=0))
