"""Where the tensors of a layer with experts go, under the names that most families give them."""

from collections.abc import Sequence

from jaxgen_checkpoints.container import LayerContainer
from jaxgen_checkpoints.parameters.moe import ExpertsDown, GatedExperts, Router
from jaxgen_checkpoints.parameters.shared_expert import SharedExpertDown, SharedExpertGateUp
from jaxgen_models.moe_config import MoEConfig


class ExpertsPart(LayerContainer):
    """A router and one tensor for each expert's gate, up and down."""

    router: Router
    experts_gate_up: GatedExperts
    experts_down: ExpertsDown

    PARAM_MAPPING = {
        "mlp.gate.weight": "router.weight",
        "mlp.experts.*.gate_proj.weight": "experts_gate_up.gate",
        "mlp.experts.*.up_proj.weight": "experts_gate_up.up",
        "mlp.experts.*.down_proj.weight": "experts_down.down",
    }


class SharedExpertPart(LayerContainer):
    """The expert that every token visits; families name its tensors."""

    shared_gate_up: SharedExpertGateUp
    shared_down: SharedExpertDown


def layer_kinds(
    config: MoEConfig, dense: type[LayerContainer], sparse: type[LayerContainer]
) -> Sequence[type[LayerContainer]]:
    """The container of each layer."""
    return [sparse if has_experts else dense for has_experts in config.sparse]
