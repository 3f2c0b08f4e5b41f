"""How a GPT-2 checkpoint becomes a model."""

from types import MappingProxyType
from typing import ClassVar

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.decoder_container import decoder_map
from jaxgen_models.gpt2.config import GPT2Config
from jaxgen_models.gpt2.container import UNMAPPED, GPT2Ends, GPT2Layer
from jaxgen_models.gpt2.model import GPT2LMHeadModel
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.layers.activation import ACTIVATIONS
from jaxgen_models.multi_head_fields import head_width, token_fields
from jaxgen_models.policy import InferencePolicy


class GPT2Policy(InferencePolicy):
    """GPT2LMHeadModel."""

    family = "gpt2"
    architectures = ("GPT2LMHeadModel",)
    model_types = ("gpt2",)
    refuses: ClassVar = MappingProxyType({"add_cross_attention": True})
    decoder = GPT2LMHeadModel

    @classmethod
    def read_config(cls, hf: HFConfig) -> GPT2Config:
        """Absent keys mean the sizes of the smallest GPT-2."""
        # Kept apart from n_positions by nobody; the summary_* are other heads'; and scores are in
        # float32 here whatever reorder_and_upcast_attn says.
        hf.ignore("n_ctx", "reorder_and_upcast_attn")
        hf.ignore(*(f"summary_{name}" for name in _SUMMARY))
        num_layers = hf.size(hf.spelling("n_layer", "num_hidden_layers"), 12)
        model_dim = hf.size(hf.spelling("n_embd", "hidden_size"), 768)
        heads = hf.size(hf.spelling("n_head", "num_attention_heads"), 12)
        positions = hf.size(hf.spelling("n_positions", "max_position_embeddings"), 1024)
        config = GPT2Config(
            num_layers=num_layers,
            model_dim=model_dim,
            heads=heads,
            kv_heads=heads,
            head_dim=head_width(hf, model_dim, heads),
            ffn_dim=hf.size("n_inner", 4 * model_dim),
            norm_eps=hf.number("layer_norm_epsilon", 1e-5),
            activation=hf.choice("activation_function", tuple(ACTIVATIONS), "gelu_new"),
            windows=(None,) * int(num_layers),
            max_context=int(positions),
            position_rows=positions,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            scaled=hf.flag("scale_attn_weights", True),
            scaled_by_depth=hf.flag("scale_attn_by_inverse_layer_idx", False),
            **token_fields(
                hf, tied=True, vocab_size=hf.size("vocab_size", 50257), eos=50256, bos=50256
            ),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """transformer.h.N, transformer.{wte,wpe,ln_f} and lm_head."""
        return decoder_map(
            self.config,
            "transformer.h",
            GPT2Layer,
            GPT2Ends,
            UNMAPPED,
            "transformer.wte.weight",
            prefix="transformer.",
        )


_SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
