"""How a configuration lays a model on devices, and what cannot be divided so."""

from collections.abc import Sequence

from jaxgen.config import EngineConfig
from jaxgen_checkpoints.errors import ConfigError
from jaxgen_checkpoints.mesh_layout import (
    DEFAULT_RULES,
    WHOLE_EXPERTS,
    Device,
    MeshLayout,
    make_mesh,
)
from jaxgen_models.policy import InferencePolicy


def mesh_layout(
    policy: InferencePolicy,
    config: EngineConfig,
    *,
    replicas: int = 1,
    devices: Sequence[Device] | None = None,
) -> MeshLayout:
    """The mesh of so many replicas, on the first of `devices` or of all that there are.

    ConfigError if there are fewer experts than they are to be divided into.
    """
    _check_experts(policy, config)
    mesh = make_mesh(
        tensor=config.tensor_parallel_size,
        expert=config.expert_parallel_size,
        data=replicas,
        devices=devices,
    )
    return MeshLayout(mesh, WHOLE_EXPERTS if config.enable_expert_parallel else DEFAULT_RULES)


def _check_experts(policy: InferencePolicy, config: EngineConfig) -> None:
    experts = int(getattr(policy.config, "num_experts", 0))
    parts, option = config.expert_parallel_size, "expert_parallel_size"
    if config.enable_expert_parallel:
        parts *= config.tensor_parallel_size
        option = "enable_expert_parallel with tensor_parallel_size * expert_parallel_size"
        if not experts:
            raise ConfigError("enable_expert_parallel, but the model has no experts: leave it out")
    if parts > max(1, experts):
        raise ConfigError(
            f"{option} = {parts}, but the model has {experts or 'no'} experts: leave it out, or "
            "lower it"
        )
