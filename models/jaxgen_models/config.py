"""What a decoder needs to know of its checkpoint: sizes, switches and numbers, independent of key
names.
"""

from dataclasses import dataclass, field

from jaxgen_checkpoints.dim import Dim
from jaxgen_models.alibi_config import AlibiConfig
from jaxgen_models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes are `Dim`s, so that a message about a shape can name the config field it follows from.

    windows: one entry a layer; None attends to everything, W to the token itself and the W-1 before
      it.
    rope, alibi: how positions enter the attention, if they do.
    max_context: tokens that positions are defined for.
    attention_soft_cap: scores are capped to soft_cap * tanh(score / soft_cap).
    """

    num_layers: Dim
    model_dim: Dim
    heads: Dim
    kv_heads: Dim
    head_dim: Dim
    ffn_dim: Dim
    vocab_size: Dim
    norm_eps: float
    activation: str
    rope: RopeConfig | None = None
    alibi: AlibiConfig | None = None
    windows: tuple[int | None, ...]
    max_context: int
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_soft_cap: float | None = None
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = field(default=())
    bos_token_id: int | None = None

    @property
    def untied(self) -> bool:
        """Whether the unembedding is a tensor of its own."""
        return not self.tied

    @property
    def unbounded(self) -> bool:
        """Whether positions beyond max_context are defined too: where nothing but a distance, or a
        base that grows with the length, tells them apart.
        """
        return self.alibi is not None or (self.rope is not None and self.rope.unbounded)

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotation of each layer; None for a layer that does not rotate."""
        return (self.rope,) * int(self.num_layers)

    @property
    def recompute_at(self) -> int | None:
        """The length that a sequence may not outgrow with the keys it has: past it all positions
        rotate otherwise.
        """
        lengths = [rope.switch_context for rope in self.layer_ropes if rope is not None]
        return min((length for length in lengths if length is not None), default=None)

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return float(self.head_dim) ** -0.5

    def layer_scale(self, index: int) -> float:
        """As attention_scale, of layer `index`."""
        del index
        return self.attention_scale
