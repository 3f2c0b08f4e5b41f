"""How a GPT-NeoX checkpoint becomes a model."""

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_models.gpt_neox.config import GPTNeoXConfig
from jaxgen_models.gpt_neox.container import UNMAPPED, GPTNeoXEnds, GPTNeoXLayer
from jaxgen_models.gpt_neox.model import GPTNeoXForCausalLM
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.layers.activation import ACTIVATIONS
from jaxgen_models.multi_head_fields import head_width, token_fields
from jaxgen_models.policy import InferencePolicy
from jaxgen_models.rope_config import RopeConfig, read_rope_table


class GPTNeoXPolicy(InferencePolicy):
    """GPTNeoXForCausalLM."""

    family = "gpt_neox"
    architectures = ("GPTNeoXForCausalLM",)
    model_types = ("gpt_neox",)
    decoder = GPTNeoXForCausalLM

    @classmethod
    def read_config(cls, hf: HFConfig) -> GPTNeoXConfig:
        """Absent keys mean the sizes of GPT-NeoX 20B; attention_bias covers q, k, v and output."""
        num_layers = hf.size("num_hidden_layers", 44)
        model_dim = hf.size("hidden_size", 6144)
        heads = hf.size("num_attention_heads", 64)
        head_dim = head_width(hf, model_dim, heads)
        positions = int(hf.size("max_position_embeddings", 2048))
        rope = _rope(hf, int(head_dim), positions)
        attention_bias = hf.flag("attention_bias", True)
        config = GPTNeoXConfig(
            num_layers=num_layers,
            model_dim=model_dim,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            ffn_dim=hf.size("intermediate_size", 24576),
            norm_eps=hf.number("layer_norm_eps", 1e-5),
            activation=hf.choice("hidden_act", tuple(ACTIVATIONS), "gelu"),
            rope=rope,
            windows=(None,) * int(num_layers),
            max_context=rope.context(positions),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=True,
            parallel=hf.flag("use_parallel_residual", True),
            **token_fields(hf, tied=False, vocab_size=hf.size("vocab_size", 50432), eos=2, bos=0),
        )
        hf.finish(cls.family)
        return config

    def build_container_map(self) -> ContainerMap:
        """gpt_neox.layers.N, gpt_neox.{embed_in,final_layer_norm} and embed_out."""
        containers = ContainerMap()
        containers.set_other_beginnings({"": "gpt_neox."})
        containers.set_transformer_params(
            ["gpt_neox.layers"], [GPTNeoXLayer(self.config) for _ in range(self.config.num_layers)]
        )
        containers.set_non_transformer_params(GPTNeoXEnds(self.config))
        containers.set_unmapped_params(UNMAPPED)
        # transformers 5 calls the head lm_head, and may write it so.
        embedding = "gpt_neox.embed_in.weight"
        containers.set_tied(
            {"embed_out.weight": embedding, "lm_head.weight": embedding}
            if self.config.tied
            else {"lm_head.weight": "embed_out.weight"}
        )
        return containers


def _rope(hf: HFConfig, head_dim: int, positions: int) -> RopeConfig:
    """rotary_pct and rotary_emb_base are old names; the table, where there is one, comes first."""
    key = "rope_parameters" if hf.table("rope_parameters") is not None else "rope_scaling"
    table = dict(hf.table(key) or {})
    hf.table("rope_scaling")
    theta = hf.number("rotary_emb_base", 10000.0)
    part = hf.number("rotary_pct", 0.25)
    # Some exports repeat them under the names of other families, which this one does not read.
    for repeated, value in (("rope_theta", theta), ("partial_rotary_factor", part)):
        if hf.number(repeated, value) != value:
            raise hf.error(f"{repeated} = {hf.raw[repeated]} differs from the family's own {value}")
    given = table.pop("partial_rotary_factor", None)
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise hf.error(f"{key} partial_rotary_factor must be a number, got {given!r}")
        part = float(given)
    rotated = int(head_dim * part)
    if not 0 < part <= 1 or rotated < 1 or (rotated % 2 and rotated == head_dim):
        raise hf.error(f"rotary_pct = {part} rotates {rotated} of {head_dim} channels")
    return read_rope_table(hf, key, table, rotated, positions, theta)
