"""The sizes that parameters ask a model for."""

from typing import Protocol


class ModelShape(Protocol):
    """Sizes of a model, each a `Dim` so that a wrong tensor can be explained by config fields.

    Parameters ask for more by name where a family has more: `num_experts`, `expert_ffn_dim`, and
    whatever a `ParameterList` counts by or `present_if` asks about.
    """

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def model_dim(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def heads(self) -> int:
        """Query heads."""
        ...

    @property
    def kv_heads(self) -> int:
        """Key/value heads; divides `heads`."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        ...

    @property
    def ffn_dim(self) -> int:
        """Width of the dense MLP's hidden layer."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        ...


class MoEShape(ModelShape, Protocol):
    """Sizes of a model with experts."""

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        ...

    @property
    def expert_ffn_dim(self) -> int:
        """Width of one expert's hidden layer."""
        ...
