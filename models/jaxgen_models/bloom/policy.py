"""How a BLOOM checkpoint becomes a model."""

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.alibi_config import AlibiConfig, published_slopes
from jaxgen_models.bloom.config import BloomConfig
from jaxgen_models.bloom.container import BloomEnds, BloomLayer
from jaxgen_models.bloom.model import BloomForCausalLM
from jaxgen_models.decoder_container import decoder_map
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.multi_head_fields import head_width, token_fields
from jaxgen_models.policy import InferencePolicy

# How the training program fused its kernels, or laid out what is one tensor here.
_TRAINING = (
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "attention_softmax_in_fp32",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "offset_alibi",
    "n_inner",
)


class BloomPolicy(InferencePolicy):
    """BloomForCausalLM."""

    family = "bloom"
    architectures = ("BloomForCausalLM",)
    model_types = ("bloom",)
    decoder = BloomForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> BloomConfig:
        """Absent keys mean what transformers' class has; only seq_length says how long it was
        trained.
        """
        hf.ignore(*_TRAINING)
        _refuse_slices(hf)
        num_layers = hf.size(hf.spelling("n_layer", "num_hidden_layers"), 2)
        model_dim = hf.size(hf.spelling("hidden_size", "n_embed"), 64)
        heads = hf.size(hf.spelling("n_head", "num_attention_heads"), 8)
        config = BloomConfig(
            num_layers=num_layers,
            model_dim=model_dim,
            heads=heads,
            kv_heads=heads,
            head_dim=head_width(hf, model_dim, heads),
            ffn_dim=model_dim * 4,
            norm_eps=hf.number("layer_norm_epsilon", 1e-5),
            activation="gelu_new",
            alibi=AlibiConfig(slopes=published_slopes(int(heads)), kv_heads=int(heads)),
            windows=(None,) * int(num_layers),
            max_context=int(hf.size("seq_length", 2048)),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            residual_after_norm=hf.flag("apply_residual_connection_post_layernorm", False),
            **token_fields(hf, tied=True, vocab_size=hf.size("vocab_size", 250880), eos=2, bos=1),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """transformer.h.N, transformer.{word_embeddings,ln_f} and lm_head."""
        return decoder_map(
            self.config,
            "transformer.h",
            BloomLayer,
            BloomEnds,
            [],
            "transformer.word_embeddings.weight",
            prefix="transformer.",
        )


def _refuse_slices(hf: HFConfig) -> None:
    """slow_but_exact asks for products in as many slices as the training had. transformers leaves
    two of the biases out there, so that nothing says what such a checkpoint should give.
    """
    slices = int(hf.size("pretraining_tp", 1))
    if hf.flag("slow_but_exact", False) and slices > 1:
        raise hf.error(
            f"slow_but_exact = true with pretraining_tp = {slices} is not supported: it differs "
            "from the exact product in rounding only; set it to false"
        )
