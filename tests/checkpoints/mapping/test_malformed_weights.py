"""Each fixture with wrong weights is refused, or loaded with a warning, in the asked words."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_checkpoints.container import LayerContainer, present_if
from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.dim import Dim
from jaxgen_checkpoints.errors import CheckpointError, CheckpointWarning
from jaxgen_checkpoints.load import load
from jaxgen_checkpoints.mesh_layout import MeshLayout, make_mesh
from jaxgen_checkpoints.parameters.attention_output import AttentionOutput
from jaxgen_checkpoints.parameters.embedding import Embedding, Unembedding
from jaxgen_checkpoints.parameters.mlp import MLP2, GatedMLP
from jaxgen_checkpoints.parameters.norm import Norm
from jaxgen_checkpoints.parameters.qkv import UnfusedQKV

BAD = Path(__file__).resolve().parents[2] / "fixtures" / "bad"
CASES = {
    name: case
    for name, case in json.loads((BAD / "manifest.json").read_text())["cases"].items()
    if case["stage"] == "weights" or name in ("unreadable_bytes_in_name", "good_sharded")
}


class Layer(LayerContainer):
    attention_norm: Norm
    qkv: UnfusedQKV
    out: AttentionOutput
    mlp_norm: Norm
    gate_up: GatedMLP
    down: MLP2

    PARAM_MAPPING = {
        "input_layernorm.weight": "attention_norm.weight",
        "self_attn.q_proj.weight": "qkv.q",
        "self_attn.k_proj.weight": "qkv.k",
        "self_attn.v_proj.weight": "qkv.v",
        "self_attn.o_proj.weight": "out.weight",
        "post_attention_layernorm.weight": "mlp_norm.weight",
        "mlp.gate_proj.weight": "gate_up.gate",
        "mlp.up_proj.weight": "gate_up.up",
        "mlp.down_proj.weight": "down.weight",
    }


class Ends(LayerContainer):
    embed: Embedding
    norm: Norm
    unembed: Unembedding = present_if("untied")

    PARAM_MAPPING = {
        "model.embed_tokens.weight": "embed.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "unembed.weight",
    }


def llama_map(config):
    def size(field):
        return Dim(config[field], field)

    heads = size("num_attention_heads")
    model = SimpleNamespace(
        num_layers=size("num_hidden_layers"),
        model_dim=size("hidden_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads"),
        head_dim=size("hidden_size") // heads,
        ffn_dim=size("intermediate_size"),
        vocab_size=size("vocab_size"),
        untied=not config["tie_word_embeddings"],
    )
    containers = ContainerMap()
    containers.set_transformer_params(["model.layers"], [Layer(model)] * model.num_layers)
    containers.set_non_transformer_params(Ends(model))
    return containers


@pytest.mark.parametrize("name", CASES)
def test_the_message_says_what_the_manifest_asks(name):
    case = CASES[name]
    mesh = MeshLayout(make_mesh(tensor=2))
    refusal = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = open_checkpoint(BAD / name)
        try:
            described = llama_map(checkpoint.config).describe(checkpoint.source, mesh)
        except CheckpointError as error:
            refusal = str(error)
        else:
            load(described, mesh, "float32")
    told = "\n".join(str(w.message) for w in caught if w.category is CheckpointWarning)
    if case["severity"] == "error":
        assert refusal
    elif case["severity"] in ("warning", "error-or-warning"):
        assert told
        assert not refusal
    else:
        assert not told + refusal
    assert (refusal + told).isprintable() or "\n" in refusal + told
    for words in case["message_should_mention"]:
        assert words in refusal + told
