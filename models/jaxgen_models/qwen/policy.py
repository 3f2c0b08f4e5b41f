"""How a checkpoint of the first Qwen becomes a model."""

from types import MappingProxyType
from typing import ClassVar

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.dim import Dim
from jaxgen_models.decoder_container import decoder_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.multi_head_fields import token_fields
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.qwen.config import QwenConfig
from jaxgen_models.qwen.container import UNMAPPED, QwenEnds, QwenLayer
from jaxgen_models.qwen.model import QWenLMHeadModel
from jaxgen_models.rope_config import RopeConfig

# Dropout, and how the authors' code computes: what it computes is the same.
_COMPUTING = (
    "attn_dropout_prob",
    "emb_dropout_prob",
    "use_flash_attn",
    "softmax_in_fp32",
    "onnx_safe",
)
_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class QwenPolicy(InferencePolicy):
    """QWenLMHeadModel, whose code is on the hub and not in transformers."""

    family = "qwen"
    architectures = ("QWenLMHeadModel",)
    model_types = ("qwen",)
    refuses: ClassVar = MappingProxyType({"scale_attn_weights": False})
    decoder = QWenLMHeadModel

    @classmethod
    def read_config(cls, hf: HFConfig) -> QwenConfig:
        """Absent keys mean what the authors' class has, the sizes of Qwen 7B; seq_length is
        needed.
        """
        hf.ignore(*_COMPUTING)
        if not hf.flag("scale_attn_weights", True):
            raise hf.error("scale_attn_weights = false is not supported")
        num_layers = hf.size("num_hidden_layers", 32)
        model_dim = hf.size("hidden_size", 4096)
        heads = hf.size("num_attention_heads", 32)
        head_dim = hf.size("kv_channels", 128)
        if heads * head_dim != model_dim:
            raise hf.error(
                f"hidden_size = {model_dim} must be num_attention_heads * kv_channels = "
                f"{heads * head_dim}"
            )
        trained = int(hf.size("seq_length"))
        dynamic = hf.flag("use_dynamic_ntk", True)
        biases = not hf.flag("no_bias", True)
        fields = token_fields(hf, tied=False, vocab_size=hf.size("vocab_size", 151936), eos=151643)
        fields["dtype"] = _dtype(hf, fields["dtype"])
        config = QwenConfig(
            num_layers=num_layers,
            model_dim=model_dim,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            ffn_dim=_half(hf, hf.size("intermediate_size", 22016)),
            norm_eps=hf.number("layer_norm_epsilon", 1e-6),
            activation="silu",
            rope=_rope(hf, head_dim, dynamic=dynamic),
            windows=(None,) * int(num_layers),
            max_context=max(trained, int(hf.size("max_position_embeddings", 8192))),
            qkv_bias=True,
            output_bias=biases,
            mlp_bias=biases,
            trained_context=trained,
            dynamic_ntk=dynamic,
            logn=hf.flag("use_logn_attn", True),
            **fields,
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """transformer.h.N, transformer.{wte,ln_f} and lm_head."""
        return decoder_map(
            self.config,
            "transformer.h",
            QwenLayer,
            QwenEnds,
            UNMAPPED,
            "transformer.wte.weight",
            prefix="transformer.",
        )


def _half(hf: HFConfig, width: Dim) -> Dim:
    """intermediate_size counts gate and up together."""
    if width % 2:
        raise hf.error(f"intermediate_size = {width} must be even: gate and up are half of it each")
    return width // 2


def _rope(hf: HFConfig, head_dim: int, *, dynamic: bool) -> RopeConfig:
    part = hf.number("rotary_pct", 1.0)
    rotated = int(head_dim * part)
    if part > 1 or rotated < (4 if dynamic else 2) or rotated % 2:
        raise hf.error(
            f"rotary_pct = {part} rotates {rotated} of {head_dim} channels; expected an even "
            "number of them, 4 at least where the base is stretched"
        )
    return RopeConfig(theta=hf.number("rotary_emb_base", 10000.0), dim=rotated)


def _dtype(hf: HFConfig, stored: str) -> str:
    """One of bf16, fp16 and fp32 may say what to compute in; otherwise it is the stored type."""
    chosen = [name for flag, name in _TYPES.items() if hf.flag(flag, False)]
    if len(chosen) > 1:
        raise hf.error(f"bf16, fp16 and fp32: only one may be true, got {', '.join(chosen)}")
    return chosen[0] if chosen else stored
