"""How the attention that begins a chain turns its heads, and how they attend."""

from dataclasses import dataclass, fields
from typing import Any

from pallas_kernels.rope_write.heads import HeadNorms, Leaf, Rotation


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """qkv_attention's arguments of these names. sinks: [heads]."""

    scale: float
    rotation: Rotation | None = None
    norms: HeadNorms | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: Leaf = None

    def by_name(self) -> dict[str, Any]:
        """As qkv_attention takes them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def of_problem(self) -> dict[str, Any]:
        """Those that say whether an implementation can serve."""
        options = self.by_name()
        del options["scale"]
        return options
