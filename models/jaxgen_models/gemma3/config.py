"""Gemma 3's two rotations: one for layers that see everything, one for those with a window."""

from dataclasses import dataclass

from jaxgen_models.rope_config import RopeConfig
from jaxgen_models.soft_capped_config import SoftCappedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(SoftCappedConfig):
    """local_rope: the rotation of layers with a window; `rope` is that of the others."""

    local_rope: RopeConfig

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotation of each layer."""
        return tuple(self.rope if window is None else self.local_rope for window in self.windows)
