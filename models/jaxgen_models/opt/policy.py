"""How an OPT checkpoint becomes a model."""

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.dim import Dim
from jaxgen_models.decoder_container import decoder_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.layers.activation import ACTIVATIONS
from jaxgen_models.multi_head_fields import head_width, token_fields
from jaxgen_models.opt.config import OPTConfig
from jaxgen_models.opt.container import OPTEnds, OPTLayer
from jaxgen_models.opt.model import OPTForCausalLM
from jaxgen_models.policy import InferencePolicy

# Positions begin at the third row of their table: two rows were the padding's.
_FIRST_POSITION = 2


class OPTPolicy(InferencePolicy):
    """OPTForCausalLM."""

    family = "opt"
    architectures = ("OPTForCausalLM",)
    model_types = ("opt",)
    decoder = OPTForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> OPTConfig:
        """Absent keys mean the sizes of OPT 125m; enable_bias covers every projection."""
        hf.ignore("dropout", "activation_dropout", "layerdrop", "init_std")
        if not hf.flag("learned_embeddings", True):
            raise hf.error("learned_embeddings = false is not supported")
        num_layers = hf.size("num_hidden_layers", 12)
        model_dim = hf.size("hidden_size", 768)
        heads = hf.size("num_attention_heads", 12)
        positions = hf.size("max_position_embeddings", 2048)
        biases = hf.flag("enable_bias", True)
        norm_before = hf.flag("do_layer_norm_before", True)
        removed = hf.flag("_remove_final_layer_norm", False)
        config = OPTConfig(
            num_layers=num_layers,
            model_dim=model_dim,
            heads=heads,
            kv_heads=heads,
            head_dim=head_width(hf, model_dim, heads),
            ffn_dim=hf.size("ffn_dim", 3072),
            norm_eps=1e-5,
            activation=hf.choice("activation_function", tuple(ACTIVATIONS), "relu"),
            windows=(None,) * int(num_layers),
            max_context=int(positions),
            position_rows=Dim(positions + _FIRST_POSITION, "max_position_embeddings + 2"),
            position_offset=_FIRST_POSITION,
            embed_dim=hf.size("word_embed_proj_dim", model_dim),
            qkv_bias=biases,
            output_bias=biases,
            mlp_bias=biases,
            norm_before=norm_before,
            last_norm=norm_before and not removed,
            affine_norms=hf.flag("layer_norm_elementwise_affine", True),
            **token_fields(hf, tied=True, vocab_size=hf.size("vocab_size", 50272), eos=2, bos=2),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """model.decoder.layers.N, the rest of model.decoder, and lm_head."""
        return decoder_map(
            self.config,
            "model.decoder.layers",
            OPTLayer,
            OPTEnds,
            [],
            "model.decoder.embed_tokens.weight",
            prefix="model.",
        )
