"""How a Falcon checkpoint becomes a model."""

from typing import cast

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.dim import Dim
from jaxgen_models.alibi_config import AlibiConfig, published_slopes
from jaxgen_models.decoder_container import decoder_map
from jaxgen_models.falcon.config import FalconConfig
from jaxgen_models.falcon.container import (
    UNMAPPED,
    FalconEnds,
    FalconLayer,
    FalconSequentialLayer,
    FalconTwoNormLayer,
)
from jaxgen_models.falcon.model import FalconForCausalLM
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.layers.activation import ACTIVATIONS
from jaxgen_models.multi_head_fields import head_width, token_fields
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.rope_config import read_rope


class FalconPolicy(InferencePolicy):
    """FalconForCausalLM: 1B, 7B, 11B, 40B and 180B."""

    family = "falcon"
    architectures = ("FalconForCausalLM",)
    model_types = ("falcon",)
    decoder = FalconForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> FalconConfig:
        """Absent keys mean the sizes of Falcon 7B; `bias` covers every projection."""
        # Neither has any effect in the model; ffn_hidden_size says what ff_factor once did.
        hf.ignore("apply_residual_connection_post_layernorm", "ff_factor")
        num_layers = hf.size("num_hidden_layers", 32)
        model_dim = hf.size(hf.spelling("hidden_size", "n_embed"), 4544)
        heads = hf.size("num_attention_heads", 71)
        head_dim = head_width(hf, model_dim, heads)
        new = hf.flag("new_decoder_architecture", False)
        kv_heads = _kv_heads(hf, heads, new=new)
        parallel, two_norms = _wiring(hf, new=new)
        biases = hf.flag("bias", False)
        positions = int(hf.size("max_position_embeddings", 2048))
        alibi = hf.flag("alibi", False)
        rope = read_rope(hf, int(head_dim), positions)
        if not alibi and head_dim % 2:
            raise hf.error(f"heads of {head_dim} channels: rotary embedding turns pairs of them")
        config = FalconConfig(
            num_layers=num_layers,
            model_dim=model_dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_dim=hf.size("ffn_hidden_size", model_dim * 4),
            norm_eps=hf.number("layer_norm_epsilon", 1e-5),
            activation=hf.choice("activation", tuple(ACTIVATIONS), "gelu"),
            rope=None if alibi else rope,
            # The bias is added before the scores are scaled.
            alibi=AlibiConfig(
                slopes=published_slopes(int(heads)),
                kv_heads=int(kv_heads),
                rounded_scale=float(head_dim) ** -0.5,
            )
            if alibi
            else None,
            windows=(None,) * int(num_layers),
            max_context=positions if alibi else rope.context(positions),
            qkv_bias=biases,
            output_bias=biases,
            mlp_bias=biases,
            parallel=parallel,
            two_norms=two_norms,
            **token_fields(hf, tied=True, vocab_size=hf.size("vocab_size", 65024), eos=11, bos=11),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """transformer.h.N, transformer.{word_embeddings,ln_f} and lm_head."""
        config = cast(FalconConfig, self.config)
        layer = FalconTwoNormLayer if config.two_norms else FalconLayer
        layer = layer if config.parallel else FalconSequentialLayer
        embedding = "transformer.word_embeddings.weight"
        return decoder_map(
            config,
            "transformer.h",
            layer,
            FalconEnds,
            UNMAPPED,
            embedding,
            prefix="transformer.",
        )


def _kv_heads(hf: HFConfig, heads: Dim, *, new: bool) -> Dim:
    """num_kv_heads counts in the new architecture only; before it was one, or as many as heads."""
    multi_query = hf.flag("multi_query", True)
    given = hf.size("num_kv_heads", heads)
    if not new:
        return Dim(1, "1") if multi_query else heads
    if heads % given:
        raise hf.error(
            f"num_attention_heads = {heads} cannot be grouped evenly over num_kv_heads = {given}"
        )
    return given


def _wiring(hf: HFConfig, *, new: bool) -> tuple[bool, bool]:
    """Whether blocks are parallel, and whether such a block has two norms."""
    parallel = hf.flag("parallel_attn", True)
    norms = int(hf.size("num_ln_in_parallel_attn", 2 if new else 1))
    if new and not parallel:
        raise hf.error(
            "new_decoder_architecture with parallel_attn = false is not a model that was ever "
            "released: blocks of the new architecture are parallel"
        )
    if norms > (2 if new else 1) and parallel:
        raise hf.error(
            f"num_ln_in_parallel_attn = {norms} is not known for "
            f"new_decoder_architecture = {str(new).lower()}; supported: {'1, 2' if new else '1'}"
        )
    return parallel, parallel and norms == 2
