"""What the golden runs of the older families do not show: long prompts, refusals, contexts."""

import numpy as np
import pytest

from jaxgen.engine.build import build_hf_engine
from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.errors import CheckpointError, ConfigError
from jaxgen_checkpoints.mesh_layout import MeshLayout, make_mesh
from jaxgen_checkpoints.readers.memory import MemorySource
from jaxgen_models.alibi_config import published_slopes
from jaxgen_models.registry import find_policy

FALCON_NEW = {"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True}
QWEN = {"architectures": ["QWenLMHeadModel"], "seq_length": 256}
REFUSED = {
    "falcon, new but not parallel": ({**FALCON_NEW, "parallel_attn": False}, "parallel_attn"),
    "falcon, three norms": (
        {**FALCON_NEW, "num_ln_in_parallel_attn": 3},
        "num_ln_in_parallel_attn = 3",
    ),
    "falcon, two norms in the old architecture": (
        {"architectures": ["FalconForCausalLM"], "num_ln_in_parallel_attn": 2},
        "num_ln_in_parallel_attn = 2",
    ),
    "falcon, uneven groups": (
        {**FALCON_NEW, "num_attention_heads": 71, "num_kv_heads": 8},
        "num_kv_heads = 8",
    ),
    "gpt_neox, another family's theta": (
        {"architectures": ["GPTNeoXForCausalLM"], "rope_theta": 5e5},
        "rope_theta = 500000.0",
    ),
    "bloom, two widths": (
        {"architectures": ["BloomForCausalLM"], "hidden_size": 64, "n_embed": 128},
        "two names of one setting",
    ),
    "bloom, products in slices": (
        {"architectures": ["BloomForCausalLM"], "slow_but_exact": True, "pretraining_tp": 2},
        "slow_but_exact = true with pretraining_tp = 2",
    ),
    "gpt2, heads that do not share the width": (
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 100, "n_head": 12},
        "n_embd = 100 is no multiple of n_head = 12",
    ),
    "gpt2, cross attention": (
        {"architectures": ["GPT2LMHeadModel"], "add_cross_attention": True},
        "add_cross_attention",
    ),
    "opt, unknown key": ({"architectures": ["OPTForCausalLM"], "use_rope": True}, "use_rope"),
    "qwen, two types": ({**QWEN, "bf16": True, "fp16": True}, "only one may be true"),
    "qwen, quantized cache": ({**QWEN, "use_cache_quantization": True}, "use_cache_quantization"),
    "qwen, grouped heads": ({**QWEN, "num_key_value_heads": 8}, "num_key_value_heads"),
    "qwen, no trained length": ({"architectures": ["QWenLMHeadModel"]}, "seq_length is missing"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(what):
    config, named = REFUSED[what]
    with pytest.raises(ConfigError, match=named):
        find_policy(config, {})


def test_qwen_stretches_its_base_and_its_queries_beyond_the_trained_length(golden_dir):
    folder = golden_dir("qwen_v1")
    expected = np.load(folder / "expected_long.npz")
    prompt, tail = expected["prompt"], expected["logits_tail"]
    engine = build_hf_engine(
        folder,
        {
            "dtype": "float32",
            "max_num_seqs": 1,
            "max_num_batched_tokens": len(prompt),
            "num_gpu_blocks_override": 8,
        },
    )
    logits = engine.put([0], [prompt], all_logits=True)
    np.testing.assert_allclose(logits[-len(tail) :], tail, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "unbounded"),
    [("BloomForCausalLM", True), ("OPTForCausalLM", False), ("GPT2LMHeadModel", False)],
)
def test_only_positions_without_a_table_go_on_for_ever(architecture, unbounded):
    assert find_policy({"architectures": [architecture]}, {}).policy.config.unbounded is unbounded


def test_absent_keys_mean_the_class_defaults_of_transformers():
    config = find_policy({"architectures": ["FalconForCausalLM"]}, {}).policy.config
    assert (config.model_dim, config.heads, config.kv_heads, config.tied) == (4544, 71, 1, True)
    assert config.eos_token_ids == (11,)


@pytest.mark.parametrize("heads", [1, 8, 12, 71])
def test_slopes_are_the_papers(heads):
    slopes = published_slopes(heads)
    assert len(slopes) == heads
    if heads == 8:
        np.testing.assert_allclose(slopes, [2.0**-i for i in range(1, 9)])
    if heads == 12:  # between those of 8 come every second one of 16
        np.testing.assert_allclose(slopes[8:], [2.0 ** -(i / 2) for i in (1, 3, 5, 7)], rtol=1e-6)


def test_a_name_with_and_without_the_prefix_is_one_tensor_too_many():
    config = {"architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 12, "n_head": 3}
    config |= {"n_positions": 5, "vocab_size": 7}
    containers: ContainerMap = find_policy(config, {}).policy.build_container_map()
    shapes = containers.expected_tensors()
    bare = {n.removeprefix("transformer."): np.zeros(s, np.float32) for n, s in shapes.items()}
    layout = MeshLayout(make_mesh())
    assert containers.describe(MemorySource(bare), layout)["embed"].shape == (7, 12)
    both = {**bare, "transformer.wte.weight": np.zeros((7, 12), np.float32)}
    with pytest.raises(CheckpointError, match="set twice"):
        containers.describe(MemorySource(both), layout)
