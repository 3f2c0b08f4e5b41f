"""How a Mistral checkpoint, or the text part of one that takes images, becomes a model."""

from collections.abc import Mapping

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.source import TensorInfo
from jaxgen_models.config import DecoderConfig
from jaxgen_models.decoder_config import read_decoder_config
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.mistral.container import MistralEnds, MistralLayer
from jaxgen_models.mistral.model import MistralForCausalLM
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.text_part import (
    IMAGE_TENSORS,
    read_text_part,
    text_part_map,
    with_head_looked_for,
)
from jaxgen_models.window_config import every_layer_windows


class MistralPolicy(InferencePolicy):
    """MistralForCausalLM."""

    family = "mistral"
    architectures = ("MistralForCausalLM",)
    model_types = ("mistral",)
    decoder = MistralForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """sliding_window is 4096 unless the config says otherwise."""
        return read_decoder_config(
            hf,
            cls.family,
            windows=every_layer_windows,
            kv_heads=8,
            max_positions=4096 * 32,
            activation="silu",
        )

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, MistralLayer, MistralEnds, unmapped=[])


class Mistral3Policy(MistralPolicy):
    """Mistral3ForConditionalGeneration (Small 3.1 and 3.2), its text part: images are left out."""

    family = "mistral3"
    architectures = ("Mistral3ForConditionalGeneration",)
    model_types = ("mistral3",)

    @classmethod
    def of_checkpoint(cls, hf: HFConfig, tensors: Mapping[str, TensorInfo]) -> InferencePolicy:
        """The head is a tensor of its own where there is one and no config says otherwise."""
        return super().of_checkpoint(with_head_looked_for(hf, tensors, tied=True), tensors)

    @classmethod
    def read_config(cls, hf: HFConfig) -> DecoderConfig:
        """The text model's config is nested; its head is a tensor of its own unless it is said."""
        inner = read_text_part(
            hf,
            cls.family,
            model_types=MistralPolicy.model_types,
            others=(
                "vision_config",
                "image_token_index",
                "image_token_id",
                "projector_hidden_act",
                "vision_feature_layer",
                "multimodal_projector_bias",
                "spatial_merge_size",
            ),
            tied=False,
        )
        return super().read_config(inner)

    def build_container_map(self) -> ContainerMap:
        """The text model's tensors inside the larger one, in both of its layouts."""
        return text_part_map(super().build_container_map(), IMAGE_TENSORS)
