"""No key of a config is ignored in silence: turning it changes the model or is refused, and leaving
it out means what transformers' config class has.

config_keys.json holds those classes' keys and defaults (transformers 5.24).
"""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from jaxgen_checkpoints.errors import ConfigError
from jaxgen_models.registry import find_policy, supported_architectures

KEYS: Final = json.loads((Path(__file__).parent / "config_keys.json").read_text())

# Keys that no forward pass of a finished model reads, and other ways to the same numbers.
CANNOT_MATTER: Final = {
    "activation_dropout",
    "attention_dropout",
    "attn_pdrop",
    "classifier_dropout",
    "dropout",
    "embd_pdrop",
    "hidden_dropout",
    "init_std",
    "initializer_range",
    "is_decoder",
    "layerdrop",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "slow_but_exact",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "use_cache",
}
# What transformers does not read in that family, or not in that kind of it.
MATTERS_ELSEWHERE: Final = {("deepseek_v2", "head_dim"), ("falcon", "multi_query")}
GENERATION: Final = {"bos_token_id", "eos_token_id"}

# A fixture of each family, and switches without which some of its keys would have no say.
BASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "deepseek_v2": ("deepseek_v2_qlora_group", {}),
    "exaone4_5": ("exaone4_5_text", {}),
    "exaone4": ("exaone4_hybrid", {"layer_types": None, "sliding_window_pattern": 4}),
    "falcon": ("falcon_new_gqa", {}),
    "gpt_oss": ("gpt_oss", {"experts_per_token": None}),
    "llama": ("llama_plain", {}),
    "mistral": ("mistral_swa", {}),
    "opt": ("opt_pre_ln", {}),
    "phi3": ("phi3_longrope", {}),
    "qwen": ("qwen_v1", {}),
    "qwen2": ("qwen2_tied_swa", {"layer_types": None}),
    "qwen2_moe": (
        "qwen2_moe",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
    ),
    "qwen3": ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3_moe": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
}
OTHER: Final[dict[str, Any]] = {
    "attn_logit_softcapping": 5.0,
    "ffn_hidden_size": 52,
    "final_logit_softcapping": 5.0,
    "head_dim": 24,
    "mlp_only_layers": [0],
    "n_inner": 52,
    "max_window_layers": 0,
    "num_ln_in_parallel_attn": 1,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "summary_activation": "tanh",
    "topk_method": "greedy",
    "use_bidirectional_attention": True,
    "word_embed_proj_dim": 24,
}


def base(golden_dir: Any, family: str) -> dict[str, Any]:
    name, switches = BASES.get(family, (family, {}))
    config = json.loads((golden_dir(name) / "config.json").read_text()) | switches
    return {key: value for key, value in config.items() if value is not None or key in switches}


def turned(key: str, value: Any, config: dict[str, Any]) -> Any:
    """Another value than a key has, and than its class gives it."""
    if key == "layer_types":
        return ["sliding_attention"] * config["num_hidden_layers"]
    if key in OTHER and OTHER[key] != value:
        return OTHER[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 if value else 1
    if isinstance(value, str):
        return "relu" if value != "relu" else "gelu"
    return 2


def read(config: dict[str, Any]) -> Any:
    """What the family makes of a config: its fields, or that it refuses."""
    try:
        policy = find_policy(config, {}).policy
    except ConfigError as error:
        return str(error)
    return policy.config


@pytest.mark.parametrize("family", sorted(KEYS))
def test_a_turned_key_is_heeded_or_refused(golden_dir, family) -> None:
    config = base(golden_dir, family)
    plain = read(config)
    assert not isinstance(plain, str), plain
    unheard = []
    for key, default in KEYS[family].items():
        value = config.get(key, default)
        if read({**config, key: turned(key, value, config)}) == plain:
            unheard.append((family, key))
    assert {key for key in unheard if key not in MATTERS_ELSEWHERE} <= {
        (family, key) for key in CANNOT_MATTER
    }


@pytest.mark.parametrize("family", sorted(KEYS))
def test_a_key_left_out_means_the_class_default(golden_dir, family) -> None:
    config = base(golden_dir, family)
    differing = []
    for key, default in KEYS[family].items():
        if key in CANNOT_MATTER | GENERATION:
            continue
        absent = read({name: value for name, value in config.items() if name != key})
        if isinstance(absent, str) and f"{key} is missing" in absent:
            continue
        if absent != read({**config, key: default}):
            differing.append((key, default))
    assert differing == []


@pytest.mark.parametrize("family", sorted(KEYS))
def test_null_is_no_second_default(golden_dir, family) -> None:
    """A switch that is on where it is left out is not on where it is null."""
    config = base(golden_dir, family)
    switches = [key for key, default in KEYS[family].items() if default is True]
    for key in set(switches) - CANNOT_MATTER:
        off, null = read({**config, key: False}), read({**config, key: None})
        assert isinstance(null, str) or null == off, key


# Keys of published checkpoints that nothing reads: what Llamas and Vicunas, SmolLM2, Falcon 3, the
# YaRN models, GPT-2's larger sizes, DistilGPT-2, Dolly, Galactica, Qwen 1.5 and Qwen3-Coder say.
UNREAD: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("llama", {"max_sequence_length": 2048}),
    ("llama", {"is_llama_config": True, "rope_interleaved": False}),
    ("llama", {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}),
    ("llama", {"activation": "swiglu", "_commit_hash": "c0ffee"}),
    ("llama", {"neftune_noise_alpha": 5}),
    ("gpt2", {"n_special": 0, "predict_special_tokens": True, "output_past": True}),
    ("gpt2", {"_num_labels": 1}),
    ("gpt_neox", {"custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.Pipe"}}}),
    ("opt", {"learned_embeddings": True, "scale_embeddings": False}),
    ("qwen2", {"seed": 1234}),
    ("qwen3_moe", {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}),
)


@pytest.mark.parametrize(("family", "said"), UNREAD, ids=lambda value: str(value)[:40])
def test_what_published_configs_say_besides_changes_nothing(golden_dir, family, said) -> None:
    config = base(golden_dir, family)
    assert read({**config, **said}) == read(config)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llama", {"activation": "relu"}),
        ("llama", {"rope_interleaved": True}),
        ("opt", {"learned_embeddings": False}),
        ("qwen3_moe", {"use_qk_norm": False}),
    ],
)
def test_but_what_it_would_change_is_refused(golden_dir, family, said) -> None:
    with pytest.raises(ConfigError, match=next(iter(said))):
        find_policy({**base(golden_dir, family), **said}, {})


def test_a_stretch_that_the_model_was_trained_for_is_a_stretch(golden_dir) -> None:
    config = base(golden_dir, "llama")
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    stretched = read({**config, "rope_scaling": yarn})
    assert read({**config, "rope_scaling": {**yarn, "finetuned": True}}) == stretched


REFUSING = {policy.family: policy.refuses for policy in supported_architectures().values()}


@pytest.mark.parametrize("family", sorted(family for family, keys in REFUSING.items() if keys))
def test_what_a_family_says_it_refuses_it_refuses(golden_dir, family) -> None:
    for key, value in REFUSING[family].items():
        config = {**base(golden_dir, family), "layer_types": None}
        inner = config.get("text_config")
        if inner is not None:
            config["text_config"] = {**inner, "layer_types": None, key: value}
        else:
            config[key] = value
        with pytest.raises(ConfigError, match=key):
            find_policy(config, {})
