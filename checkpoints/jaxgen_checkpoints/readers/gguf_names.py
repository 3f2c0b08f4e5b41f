"""GGUF's names, and its order of query and key rows, in Hugging Face terms."""

import re
from dataclasses import dataclass

import numpy as np

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PATTERN = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What `general.architecture` stands for on the Hugging Face side.

    `interleaved`: the file holds each query and key head with its rotary pairs side by side
    (rows 2i and 2i+1), where Hugging Face has them half a head apart (rows i and i + head/2).
    """

    name: str
    model_type: str
    interleaved: bool


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True),
    "mistral": Architecture("MistralForCausalLM", "mistral", interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", interleaved=False),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", interleaved=False),
}


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.bias` -> `model.layers.3.self_attn.q_proj.bias`; unknown names as they are."""
    match = _PATTERN.fullmatch(gguf_name)
    if match is None:
        return gguf_name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_TOP[part]}.{kind}" if part in _TOP else gguf_name
    if part not in _LAYER:
        return gguf_name
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"


def stored_rows(start: int, stop: int, head_dim: int) -> np.ndarray:
    """Rows of the file, int64 [stop - start], that hold rows start..stop of an interleaved tensor.

    With head_dim 4, rows 0 1 2 3 of a head lie in rows 0 2 1 3 of the file.
    """
    rows = np.arange(start, stop)
    head, within = np.divmod(rows, head_dim)
    half, pair = np.divmod(within, head_dim // 2)
    return head * head_dim + 2 * pair + half
