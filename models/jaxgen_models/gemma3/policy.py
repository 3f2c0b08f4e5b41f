"""How a Gemma 3 text checkpoint, or the text part of one that takes images, becomes a model."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.source import TensorInfo
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.gemma3.config import Gemma3Config
from jaxgen_models.gemma3.container import Gemma3Ends, Gemma3Layer
from jaxgen_models.gemma3.model import Gemma3ForCausalLM
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.rope_config import RopeConfig, read_rope_table
from jaxgen_models.soft_capped_config import soft_cap_fields
from jaxgen_models.text_part import (
    IMAGE_TENSORS,
    read_text_part,
    text_part_map,
    with_head_looked_for,
)
from jaxgen_models.window_config import Windows, hybrid_windows

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_TEXT_DEFAULTS: Final = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_OTHER_KEYS: Final = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "image_token_id",
)


class Gemma3Policy(InferencePolicy):
    """Gemma3ForCausalLM: the text models, without images."""

    family = "gemma3"
    architectures = ("Gemma3ForCausalLM",)
    model_types = ("gemma3_text",)
    refuses: ClassVar = MappingProxyType(
        {"attn_logit_softcapping": 50.0, "use_bidirectional_attention": True}
    )
    decoder = Gemma3ForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> Gemma3Config:
        """Absent keys mean the 4B model's text part; absent soft caps are none."""
        defaults = Defaults(
            tied=True,
            head_dim=256,
            kv_heads=4,
            max_positions=131072,
            activation="gelu_pytorch_tanh",
            activation_key="hidden_activation",
        )
        fields = read_decoder_fields(hf, defaults=defaults, windows=_windows, rope=_global_rope)
        # max_position_embeddings counts what the scaling reaches already.
        positions = int(hf.size("max_position_embeddings", defaults.max_positions))
        fields["max_context"] = positions
        if hf.optional_number("attn_logit_softcapping") is not None:
            # transformers reads it here but never applies it, so neither reading can be checked.
            raise hf.error("attn_logit_softcapping is not supported for Gemma 3; expected null")
        config = Gemma3Config(
            **fields,
            **soft_cap_fields(hf, attention=None, logits=None),
            qk_norm=True,
            local_rope=_local_rope(hf, int(fields["head_dim"]), positions),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, Gemma3Layer, Gemma3Ends, unmapped=[])


class Gemma3MultimodalPolicy(Gemma3Policy):
    """Gemma3ForConditionalGeneration (4B, 12B, 27B), its text part: images are left out."""

    family = "gemma3_multimodal"
    architectures = ("Gemma3ForConditionalGeneration",)
    model_types = ("gemma3",)
    refuses: ClassVar = MappingProxyType({**Gemma3Policy.refuses, "final_logit_softcapping": 30.0})

    @classmethod
    def of_checkpoint(cls, hf: HFConfig, tensors: Mapping[str, TensorInfo]) -> InferencePolicy:
        """The head is a tensor of its own where there is one and no config says otherwise."""
        return super().of_checkpoint(with_head_looked_for(hf, tensors, tied=True), tensors)

    @classmethod
    def read_config(cls, hf: HFConfig) -> Gemma3Config:
        """The text model's config is nested, and the published ones leave out half of its sizes."""
        inner = read_text_part(
            hf,
            cls.family,
            model_types=Gemma3Policy.model_types,
            others=_OTHER_KEYS,
            tied=True,
            absent=_TEXT_DEFAULTS,
        )
        if inner.optional_number("final_logit_softcapping") is not None:
            # Where there are images, transformers reads it but caps nothing.
            raise inner.error(f"final_logit_softcapping is not supported for {cls.family}")
        return super().read_config(inner)

    def build_container_map(self) -> ContainerMap:
        """The text model's tensors inside the larger one, in both of its layouts."""
        return text_part_map(super().build_container_map(), IMAGE_TENSORS)


def _windows(hf: HFConfig, num_layers: int) -> Windows:
    """Every sliding_window_pattern-th layer sees everything unless layer_types says otherwise."""
    # The underscore is how transformers 5 writes it.
    period = int(hf.size(hf.spelling("sliding_window_pattern", "_sliding_window_pattern"), 6))
    return hybrid_windows(hf, num_layers, absent=4096, period=period)


def _global_rope(hf: HFConfig, head_dim: int, positions: int) -> RopeConfig:
    """rope_scaling is of the layers that see everything alone."""
    theta = hf.number("rope_theta", 1_000_000.0)
    scaling = hf.table("rope_scaling") or {}
    if scaling.get("type", "default") != "default" and "rope_type" not in scaling:
        # Older transformers scale by it, newer ones read rope_type alone and scale nothing.
        raise hf.error(
            f"rope_scaling names its kind {scaling['type']!r} as type: call it rope_type"
        )
    table = {**_nested(hf, _GLOBAL), **scaling}
    return read_rope_table(hf, "rope_scaling", table, head_dim, positions, theta)


def _local_rope(hf: HFConfig, head_dim: int, positions: int) -> RopeConfig:
    theta = hf.number("rope_local_base_freq", 10_000.0)
    return read_rope_table(
        hf, f"rope_parameters {_LOCAL}", _nested(hf, _LOCAL), head_dim, positions, theta
    )


def _nested(hf: HFConfig, kind: str) -> dict[str, Any]:
    """The table of one kind of layer; a table for all layers would leave open whose it is."""
    tables = hf.table("rope_parameters") or {}
    if strangers := sorted(set(tables) - {_GLOBAL, _LOCAL}):
        raise hf.error(
            f"rope_parameters must have one table each for {_GLOBAL} and {_LOCAL}, "
            f"got {', '.join(strangers)}"
        )
    table = tables.get(kind)
    if table is not None and not isinstance(table, dict):
        raise hf.error(f"rope_parameters {kind} must be an object, got {table!r}")
    return dict(table or {})
