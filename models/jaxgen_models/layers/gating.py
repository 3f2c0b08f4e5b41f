"""How the gate and the up projection of an expert meet."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float

from jaxgen_models.layers.activation import ACTIVATIONS


@runtime_checkable
class Gating(Protocol):
    """Elementwise; must be hashable, since it is part of the traced program."""

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        """The hidden layer of an expert."""
        ...


@dataclass(frozen=True, slots=True)
class ActivatedGate:
    """activation(gate) * up (Shazeer, arXiv:2002.05202)."""

    activation: str

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        return ACTIVATIONS[self.activation](gate) * up
