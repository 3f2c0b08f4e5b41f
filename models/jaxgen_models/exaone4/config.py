"""Which of EXAONE 4's layers rotate."""

from dataclasses import dataclass

from jaxgen_models.config import DecoderConfig
from jaxgen_models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Exaone4Config(DecoderConfig):
    """hybrid: a window is set, so layers that see everything have no positions of their own."""

    hybrid: bool

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotation of each layer; None for a layer that does not rotate."""
        return tuple(
            None if self.hybrid and window is None else self.rope for window in self.windows
        )
