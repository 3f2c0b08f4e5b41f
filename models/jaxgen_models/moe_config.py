"""What a decoder with mixtures of experts needs to know beside a plain one, and how to read it."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from jaxgen_checkpoints.dim import Dim
from jaxgen_models.config import DecoderConfig
from jaxgen_models.hf_config import HFConfig

IGNORED_MOE_KEYS: Final = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Keys about training the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How tokens choose their experts.

    top_k: experts of a token. scoring: what makes scores of logits, over all experts. groups,
    top_groups: experts are cut into groups, and only those of the best top_groups can be chosen; a
    group is worth its best expert, or the sum of its best two (group_score). normalise: the shares
    of the chosen experts are made to add up to 1. scale: what shares are multiplied by after that.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    normalise: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """sparse: for each layer whether it has experts instead of a dense MLP of ffn_dim.

    shared_ffn_dim: width of the expert that all tokens visit, None where there is none.
    """

    num_experts: Dim
    expert_ffn_dim: Dim
    router: RouterConfig
    sparse: tuple[bool, ...]
    shared_ffn_dim: Dim | None = None

    @property
    def shared_expert(self) -> bool:
        """Whether there is an expert that all tokens visit."""
        return self.shared_ffn_dim is not None


def read_num_experts(hf: HFConfig, *names: str, default: int) -> Dim:
    """The number of routed experts, under one of its names; refused where two of them differ."""
    return hf.size(hf.spelling(*names), default)


def read_top_k(hf: HFConfig, default: int | None, num_experts: Dim) -> int:
    """Experts of a token; no more than there are. default: None for a key that must be there."""
    given = [] if default is None else [default]
    top_k = int(hf.size("num_experts_per_tok", *given))
    if top_k > num_experts:
        raise hf.error(f"num_experts_per_tok = {top_k} of {num_experts.formula} = {num_experts}")
    return top_k


def read_qwen_experts(
    hf: HFConfig, num_layers: int, *, experts: int, top_k: int, width: int
) -> dict[str, Any]:
    """Fields of a MoEConfig that Qwen's mixtures share; experts, top_k, width: what absent keys
    mean.
    """
    num_experts = read_num_experts(hf, "num_experts", "num_local_experts", default=experts)
    hf.ignore(*IGNORED_MOE_KEYS)
    return {
        "num_experts": num_experts,
        "expert_ffn_dim": hf.size("moe_intermediate_size", width),
        "router": RouterConfig(
            top_k=read_top_k(hf, top_k, num_experts), normalise=hf.flag("norm_topk_prob", False)
        ),
        "sparse": every_nth_layer_sparse(hf, num_layers),
    }


def every_nth_layer_sparse(hf: HFConfig, num_layers: int) -> tuple[bool, ...]:
    """Qwen: every decoder_sparse_step-th layer has experts, except those of mlp_only_layers."""
    step = int(hf.size("decoder_sparse_step", 1))
    dense = hf.items("mlp_only_layers") or []
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise hf.error(f"mlp_only_layers must be layer numbers, got {dense!r}")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def read_groups(
    hf: HFConfig,
    num_experts: Dim,
    top_k: int,
    *,
    best: int,
    defaults: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """(groups, groups to choose from), which must leave room for top_k experts.

    best: how many experts of a group decide on its worth. defaults: for absent keys; None for keys
    that must be there.
    """
    absent = defaults or ()
    groups = int(hf.size("n_group", *absent[:1]))
    top_groups = int(hf.size("topk_group", *absent[1:]))
    each = num_experts // groups
    if num_experts % groups or each < best:
        raise hf.error(
            f"n_group = {groups} must divide {num_experts} experts into groups of at least {best}"
        )
    if top_groups > groups or top_groups * each < top_k:
        raise hf.error(
            f"topk_group = {top_groups} of n_group = {groups} groups of {each} experts cannot give "
            f"num_experts_per_tok = {top_k}"
        )
    return groups, top_groups
