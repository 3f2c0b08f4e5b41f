"""How an EXAONE 4 checkpoint, or the text part of an EXAONE 4.5 one, becomes a model."""

from collections.abc import Mapping

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.source import TensorInfo
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.decoder_container import llama_like_map
from jaxgen_models.exaone4.config import Exaone4Config
from jaxgen_models.exaone4.container import UNMAPPED_45, Exaone4Ends, Exaone4Layer
from jaxgen_models.exaone4.model import Exaone4ForCausalLM
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.text_part import read_text_part, text_part_map, with_head_looked_for
from jaxgen_models.window_config import Windows, layer_type_windows, periodic_windows


class Exaone4Policy(InferencePolicy):
    """Exaone4ForCausalLM."""

    family = "exaone4"
    architectures = ("Exaone4ForCausalLM",)
    model_types = ("exaone4",)
    decoder = Exaone4ForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> Exaone4Config:
        """A null sliding_window means that no layer slides and that all rotate."""
        defaults = Defaults(norm_eps=1e-5, kv_heads=32, max_positions=2048, activation="silu")
        fields = read_decoder_fields(hf, defaults=defaults, windows=_windows)
        hybrid = hf.optional_size("sliding_window", absent=4096) is not None
        hf.finish(cls.family)
        return Exaone4Config(**fields, qk_norm=True, hybrid=hybrid)

    def build_container_map(self) -> ContainerMap:
        """model.layers.N, model.embed_tokens, model.norm and lm_head."""
        return llama_like_map(self.config, Exaone4Layer, Exaone4Ends, unmapped=[])


class Exaone45Policy(Exaone4Policy):
    """Exaone4_5ForConditionalGeneration, its text part: images and second tokens are left out."""

    family = "exaone4_5"
    architectures = ("Exaone4_5_ForConditionalGeneration",)
    model_types = ("exaone4_5",)

    @classmethod
    def of_checkpoint(cls, hf: HFConfig, tensors: Mapping[str, TensorInfo]) -> InferencePolicy:
        """The head is a tensor of its own where there is one and no config says otherwise."""
        return super().of_checkpoint(with_head_looked_for(hf, tensors, tied=False), tensors)

    @classmethod
    def read_config(cls, hf: HFConfig) -> Exaone4Config:
        """The text model's config is nested."""
        inner = read_text_part(
            hf,
            cls.family,
            model_types=("exaone4_5_text", "exaone4"),
            others=("vision_config", "image_token_id", "video_token_id"),
            tied=False,
        )
        return super().read_config(inner)

    def build_container_map(self) -> ContainerMap:
        """The text model's tensors inside the larger one."""
        return text_part_map(super().build_container_map(), UNMAPPED_45)


def _windows(hf: HFConfig, num_layers: int) -> Windows:
    """layer_types, or every sliding_window_pattern-th layer sees everything."""
    window = hf.optional_size("sliding_window", absent=4096)
    hf.ignore("sliding_window_pattern")
    if window is None:
        return layer_type_windows(hf, num_layers, None) or (None,) * int(num_layers)
    if hf.items("layer_types") is not None:
        return periodic_windows(hf, num_layers, window=window, period=1)
    pattern = hf.raw.get("sliding_window_pattern", 4)
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise hf.error(f"sliding_window_pattern = {pattern!r} is no number: it needs layer_types")
    return periodic_windows(hf, num_layers, window=window, period=pattern)
