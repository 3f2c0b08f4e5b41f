"""What a decoder with latent attention and experts needs to know, and the keys that DeepSeek's
families share.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from jaxgen_checkpoints.dim import Dim
from jaxgen_models.decoder_config import Defaults, read_decoder_fields
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.moe_config import IGNORED_MOE_KEYS, MoEConfig
from jaxgen_models.rope_config import RopeConfig, read_rope

_IGNORED: Final = (
    *IGNORED_MOE_KEYS,
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "qk_head_dim",
    "num_nextn_predict_layers",
    "num_mtp_layers",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMoEConfig(MoEConfig):
    """head_dim is the rotated part of a query and of the key that all heads share.

    latent_dim: what the cache holds of a token beside that key. plain_dim: channels of a head's
    query and key that do not rotate. value_dim: of its value. q_rank: width of the queries' own
    latent; None where they have none. latent_bias: whether the projections to latents and the
    output projection have biases.
    """

    latent_dim: Dim
    plain_dim: Dim
    value_dim: Dim
    q_rank: Dim | None
    rope_interleaved: bool = True
    latent_bias: bool = False

    @property
    def direct_queries(self) -> bool:
        """Whether queries are made of the hidden state itself."""
        return self.q_rank is None

    @property
    def low_rank_queries(self) -> bool:
        """Whether queries are made of a latent of their own."""
        return self.q_rank is not None

    @property
    def direct_bias(self) -> bool:
        """Whether the token's latent has a bias where queries have no latent."""
        return self.latent_bias and self.direct_queries

    @property
    def low_rank_bias(self) -> bool:
        """Whether both latents have biases."""
        return self.latent_bias and self.low_rank_queries

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by before the softmax; yarn's stretch is part of it."""
        stretch = 1.0 if self.rope is None else self.rope.softmax_stretch
        return float(self.plain_dim + self.head_dim) ** -0.5 * stretch


def read_latent_fields(hf: HFConfig, defaults: Defaults) -> dict[str, Any]:
    """Fields of a LatentMoEConfig without the experts'. Call `hf.finish` after.

    Raises ConfigError for fewer KV heads than heads, which latent attention does not have.
    """
    rotated = hf.size("qk_rope_head_dim", 64)
    if rotated % 2:
        raise hf.error(f"qk_rope_head_dim = {rotated} is odd; rotation turns pairs of channels")

    def rope(hf: HFConfig, head_dim: int, max_positions: int) -> RopeConfig:
        del head_dim
        return read_rope(hf, int(rotated), max_positions, defaults.theta)

    fields = read_decoder_fields(hf, defaults=replace(defaults, head_dim=int(rotated)), rope=rope)
    if fields["kv_heads"] != fields["heads"]:
        raise hf.error(
            f"num_key_value_heads = {fields['kv_heads']}, num_attention_heads = {fields['heads']}: "
            "latent attention makes one key and one value for every head"
        )
    bias = hf.flag("attention_bias", False)
    hf.ignore(*_IGNORED)
    return {
        **fields,
        "head_dim": rotated,
        "latent_dim": hf.size("kv_lora_rank", 512),
        "plain_dim": hf.size("qk_nope_head_dim", 128),
        "value_dim": hf.size("v_head_dim", 128),
        "q_rank": hf.optional_size("q_lora_rank", absent=1536),
        "latent_bias": bias,
        "output_bias": bias,
    }


def read_shared_width(hf: HFConfig, count: int, expert_ffn_dim: Dim) -> Dim | None:
    """Width of the shared experts, which are one; None where the config asks for none.

    count: what an absent n_shared_experts means.
    """
    given = hf.raw.get("n_shared_experts", count)
    hf.ignore("n_shared_experts")
    if given is None or (given == 0 and given is not False):
        return None
    return hf.size("n_shared_experts", count) * expert_ffn_dim


def leading_dense_layers(hf: HFConfig, num_layers: int, absent: int) -> tuple[bool, ...]:
    """Which layers have experts: all but the first first_k_dense_replace."""
    dense = hf.raw.get("first_k_dense_replace", absent)
    hf.ignore("first_k_dense_replace")
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise hf.error(f"first_k_dense_replace must be a number of layers, got {dense!r}")
    if hf.size("moe_layer_freq", 1) != 1:
        raise hf.error("moe_layer_freq must be 1: experts in every layer behind the dense ones")
    return tuple(i >= dense for i in range(num_layers))
