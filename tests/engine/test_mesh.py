"""A mesh gives the tokens of one device, whatever does or does not divide by it."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

FIXTURES = {
    "llama_bias_headdim": (),
    "llama_dynamic": (),
    "llama_linear": (),
    "llama_llama3": (),
    "llama_plain": (),
    "llama_tied": (),
    "llama_yarn": (),
    "mistral_full": (),
    "mistral_swa": (8,),
    "qwen2": (),
    "qwen2_tied_swa": (),
    "qwen3": (4,),
}
"""Fixture -> the mesh sizes of the fast suite; every other pair is slow.

Biases on a mesh are in test_put's snapshot, tied embeddings in test_program_store, nine heads over
two devices below.
"""

GOLDEN = Path(__file__).resolve().parents[1] / "fixtures" / "golden"
OTHERS = {
    folder.name: ()
    for folder in sorted(GOLDEN.iterdir())
    if (folder / "config.json").is_file() and folder.name not in FIXTURES
}
"""The fixtures of every other family: experts, latent caches, hybrids."""

MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2_lite", "deepseek_v2_qlora_group"),
    *("deepseek_v3", "gpt_oss", "gpt_oss_mxfp4"),
)

RANDOM = {(7, 1): (4,), (9, 3): (2,), (6, 2): (8,)}
"""(query heads, KV heads) -> the same, for checkpoints made here."""

SIZES = (2, 4, 8)


def pairs(table, sizes):
    return [
        pytest.param(key, size, marks=() if size in fast else pytest.mark.slow)
        for key, fast in table.items()
        for size in sizes
    ]


@pytest.mark.parametrize(("name", "shards"), [*pairs(FIXTURES, SIZES), *pairs(OTHERS, SIZES[:2])])
def test_golden_tokens_on_a_mesh(golden, one_shape, tokens, name, shards):
    case = golden(name)
    engine = one_shape(case.folder, tensor_parallel_size=shards)
    assert engine.model.mesh.size == shards
    assert tokens(engine, case.prompts) == case.greedy


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (2, 2)])
def test_golden_tokens_of_whole_experts(golden, one_shape, tokens, name, mesh):
    case, (tensor, expert) = golden(name), mesh
    engine = one_shape(
        case.folder,
        tensor_parallel_size=tensor,
        expert_parallel_size=expert,
        enable_expert_parallel=True,
    )
    assert engine.model.mesh.size == tensor * expert
    assert tokens(engine, case.prompts) == case.greedy


def write_checkpoint(folder, heads, kv_heads):
    """A Llama of one layer with random weights: vocabulary 509, ffn 75, whatever heads."""
    head, model, ffn, vocab = 8, 40, 75, 509
    dice = np.random.default_rng(heads)

    def weight(*shape):
        return (dice.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(vocab, model) * 6,
        "model.norm.weight": np.ones(model, np.float32),
        "lm_head.weight": weight(vocab, model) * 4,
    }
    shapes = {
        "self_attn.q_proj.weight": (heads * head, model),
        "self_attn.k_proj.weight": (kv_heads * head, model),
        "self_attn.v_proj.weight": (kv_heads * head, model),
        "self_attn.o_proj.weight": (model, heads * head),
        "mlp.gate_proj.weight": (ffn, model),
        "mlp.up_proj.weight": (ffn, model),
        "mlp.down_proj.weight": (model, ffn),
        "input_layernorm.weight": (model,),
        "post_attention_layernorm.weight": (model,),
    }
    tensors |= {f"model.layers.0.{name}": weight(*shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": model,
        "head_dim": head,
        "intermediate_size": ffn,
        "max_position_embeddings": 128,
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def made(tmp_path_factory, one_shape, tokens):
    """Per head counts: the checkpoint, prompts, and what one device says; made once."""
    known = {}

    def make(heads):
        if heads not in known:
            folder = tmp_path_factory.mktemp("heads_{}_{}".format(*heads))
            write_checkpoint(folder, *heads)
            dice = np.random.default_rng(1)
            prompts = [dice.integers(0, 509, length).tolist() for length in (1, 9, 30, 50)]
            known[heads] = folder, prompts, tokens(one_shape(folder), prompts)
        return known[heads]

    return make


@pytest.mark.parametrize(("heads", "shards"), pairs(RANDOM, SIZES))
def test_heads_and_widths_that_do_not_divide(one_shape, tokens, made, heads, shards):
    folder, prompts, expected = made(heads)
    engine = one_shape(folder, tensor_parallel_size=shards)
    assert tokens(engine, prompts) == expected
    assert len({tuple(ids) for ids in expected}) == len(prompts)
