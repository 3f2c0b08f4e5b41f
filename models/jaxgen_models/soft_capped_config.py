"""What Gemma's configs say beside the sizes: the scale of the scores and two soft caps."""

from dataclasses import dataclass
from typing import Any

from jaxgen_models.config import DecoderConfig
from jaxgen_models.hf_config import HFConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCappedConfig(DecoderConfig):
    """query_scalar: scores are divided by its root, in place of head_dim's.

    logit_soft_cap: logits are capped to soft_cap * tanh(logit / soft_cap).
    """

    query_scalar: float
    logit_soft_cap: float | None = None

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return self.query_scalar**-0.5


def soft_cap_fields(
    hf: HFConfig, *, attention: float | None, logits: float | None
) -> dict[str, Any]:
    """Fields of a SoftCappedConfig that a DecoderConfig has not got, and both biases.

    attention, logits: the soft caps that absent keys mean; null switches one off.
    """
    bias = hf.flag("attention_bias", False)
    # hidden_act is what hidden_activation replaced: the published code reads only the latter.
    hf.ignore("hidden_act", "cache_implementation", "sliding_window_size")
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "query_scalar": hf.number("query_pre_attn_scalar", 256.0),
        "attention_soft_cap": hf.optional_number("attn_logit_softcapping", attention),
        "logit_soft_cap": hf.optional_number("final_logit_softcapping", logits),
    }
