"""Configs are read strictly: right values, precise refusals, nothing ignored in silence."""

from pathlib import Path
from typing import Any

import pytest

from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_checkpoints.errors import ConfigError
from jaxgen_checkpoints.mesh_layout import MeshLayout, make_mesh
from jaxgen_checkpoints.readers.shape_source import ShapeSource
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.registry import find_policy, supported_architectures

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 172,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 512,
}


def read(**changes: Any):
    config = {k: v for k, v in {**LLAMA, **changes}.items() if v != "absent"}
    return find_policy(config, {}).policy.config


def test_sizes_and_their_defaults():
    config = read(num_key_value_heads="absent")
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 4, 16)
    assert config.rope.theta == 10000.0
    assert config.windows == (None, None, None)
    assert not config.tied
    assert not config.qkv_bias


def test_old_and_new_key_styles_agree():
    old = read(
        rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}, torch_dtype="float16"
    )
    new = read(
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}, dtype="float16"
    )
    assert old == new
    assert old.rope.factor == 4.0
    assert old.dtype == "float16"


@pytest.mark.parametrize("tied", [False, True])
def test_names_of_a_model_without_its_head_are_those_of_the_whole(tied):
    containers = find_policy(
        {**LLAMA, "tie_word_embeddings": tied}, {}
    ).policy.build_container_map()
    shapes = containers.expected_tensors()
    bare = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    layout = MeshLayout(make_mesh())
    described = containers.describe(ShapeSource(bare), layout, strict=True)
    assert described.keys() == containers.describe(ShapeSource(shapes), layout).keys()
    assert described["embed"].tensor.sources == {"embed_tokens.weight"}


def test_a_stranger_takes_no_window_that_is_switched_off():
    shapes = find_policy(LLAMA, {}).policy.build_container_map().expected_tensors()
    config = {**LLAMA, "architectures": ["StrangerForCausalLM"], "sliding_window": 8}
    tensors = ShapeSource(shapes).tensors()
    assert find_policy(config, tensors, "auto").policy.config.windows == (8,) * 3
    off = {**config, "use_sliding_window": False, "max_window_layers": 2}
    assert find_policy(off, tensors, "auto").policy.config.windows == (None,) * 3
    with pytest.raises(ConfigError, match="use_sliding_window"):
        find_policy({**off, "use_sliding_window": True}, tensors, "auto")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": -2}, ["num_hidden_layers", "-2"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads", "0"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads", "num_key_value_heads"]),
        ({"hidden_size": "64"}, ["hidden_size", "integer", "string"]),
        ({"hidden_size": 10**9}, ["hidden_size", "1000000000"]),
        ({"hidden_size": True}, ["hidden_size", "integer"]),
        ({"num_attention_heads": "absent"}, ["num_attention_heads", "missing"]),
        ({"head_dim": 5}, ["head_dim", "odd"]),
        ({"hidden_act": "squiglu"}, ["hidden_act", "squiglu", "silu"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
        ({"rope_scaling": {"type": "hyperbolic", "factor": 2.0}}, ["rope_scaling", "hyperbolic"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor"]),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling", "rope_type"]),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, ["two types"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, ["beta_fast"]),
        ({"rope_scaling": [2.0]}, ["rope_scaling", "object"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"mystery_gate": 3}, ["mystery_gate", "refused"]),
        ({"num_key_value_head": 2}, ["num_key_value_head", "did you mean num_key_value_heads"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    for word in ["config.json", *words]:
        assert word in str(caught.value)


def test_switched_off_strangers_are_harmless():
    assert read(quantization_config=None, mystery_gate=None, another=False) == read()


def test_mistral_window_is_on_unless_null():
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert read(**mistral).windows == (4096,) * 3
    assert read(**mistral, sliding_window=12).windows == (12,) * 3
    assert read(**mistral, sliding_window=None).windows == (None,) * 3


def test_mistral_layers_are_alike_whatever_layer_types_says():
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    slide, full = ["sliding_attention"] * 3, ["full_attention"] * 3
    assert read(**mistral, layer_types=slide).windows == (4096,) * 3
    assert read(**mistral, layer_types=full, sliding_window=None).windows == (None,) * 3
    for types in (full, [*slide[:2], full[0]]):
        with pytest.raises(ConfigError, match="layer_types must be alike: sliding_window = 4096"):
            read(**mistral, layer_types=types)


def test_qwen2_windows_upper_layers():
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 1}
    assert read(**qwen, use_sliding_window=False).windows == (None, None, None)
    config = read(**qwen, use_sliding_window=True)
    assert config.windows == (None, 8, 8)
    assert config.qkv_bias
    assert not config.output_bias
    types = ["sliding_attention", "full_attention", "full_attention"]
    explicit = read(**qwen, use_sliding_window=True, layer_types=types)
    assert explicit.windows == (8, None, None)
    with pytest.raises(ConfigError, match="layer_types has 2 entries for 3 layers"):
        read(**qwen, use_sliding_window=True, layer_types=types[:2])


def test_cache_groups_follow_the_windows():
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 1}
    policy = find_policy({**LLAMA, **qwen, "use_sliding_window": True}, {}).policy
    assert policy.cache_windows == (None, 8)
    assert policy.layer_cache_groups == (0, 1, 1)


def test_unknown_architecture_lists_what_is_supported():
    with pytest.raises(ConfigError, match=r"LlamaForCausallm is not supported.*nearest: Llama"):
        read(architectures=["LlamaForCausallm"])
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= set(supported_architectures())


def test_model_type_serves_where_architectures_is_absent():
    choice = find_policy({k: v for k, v in LLAMA.items() if k != "architectures"}, {})
    assert choice.policy.family == "llama"
    assert "architectures" in choice.reason


def test_every_golden_config_is_read(golden_dir: Any):
    for folder in sorted(Path(golden_dir("llama_plain")).parent.iterdir()):
        if (folder / "config.json").is_file():
            raw = open_checkpoint(folder).config  # narrow weights are the reader's business
            text = raw.get("text_config", raw)  # nested where there is more than text
            assert find_policy(raw, {}).policy.config.vocab_size == text["vocab_size"]


def test_a_key_read_twice_is_fine_and_an_object_is_copied():
    raw = dict(LLAMA)
    hf = HFConfig(raw)
    assert hf.size("hidden_size") == hf.size("hidden_size") == 64
    assert raw == LLAMA
