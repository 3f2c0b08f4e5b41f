"""Mixtures of experts beyond the golden runs: experts over a mesh axis of their own or in place of
tensor parallelism, padding, and what a config cannot ask for.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxgen.engine.build import build_hf_engine, describe, load_model
from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_checkpoints.errors import ConfigError
from jaxgen_checkpoints.mesh_layout import make_mesh
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.layers.experts import Experts
from jaxgen_models.layers.gating import ActivatedGate
from jaxgen_models.layers.router import Chosen
from jaxgen_models.registry import find_policy

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16}


@pytest.mark.parametrize(
    ("name", "tensor", "expert", "whole"),
    [
        *(("qwen2_moe", 2, 2, False), ("mixtral", 1, 3, False), ("deepseek_v3", 2, 4, False)),
        *(("gpt_oss", 2, 3, False), ("qwen2_moe", 2, 2, True)),
        *(
            pytest.param(*case, True, marks=pytest.mark.slow)
            for case in (
                *(("mixtral", 2, 1), ("mixtral", 4, 1), ("mixtral", 2, 2), ("qwen2_moe", 2, 1)),
                *(("qwen2_moe", 4, 1), ("qwen3_moe", 2, 1), ("qwen3_moe", 4, 2)),
                *(("deepseek_v2_lite", 2, 1), ("deepseek_v2_lite", 4, 1), ("deepseek_v3", 2, 1)),
                *(("deepseek_v3", 4, 2), ("gpt_oss", 2, 1), ("gpt_oss", 3, 1), ("gpt_oss", 2, 2)),
            )
        ),
    ],
)
def test_experts_on_devices_of_their_own(golden_dir, name, tensor, expert, whole) -> None:
    folder = golden_dir(name)
    given = {"tensor_parallel_size": tensor, "expert_parallel_size": expert}
    given |= {"enable_expert_parallel": whole}
    engine = build_hf_engine(folder, {"dtype": "float32", **OPTIONS, **given})
    assert engine.model.mesh.size == tensor * expert
    with np.load(folder / "expected.npz") as expected:
        got = engine.put([0], [expected["prompt_2"]], all_logits=True)
        np.testing.assert_allclose(got, expected["logits_2"], atol=2e-4, rtol=0)
        assert got.argmax(axis=-1).tolist() == expected["logits_2"].argmax(axis=-1).tolist()


WHOLE = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("mixtral", {"expert_parallel_size": 8}, "expert_parallel_size = 8, .* has 4 experts"),
        ("mixtral", {**WHOLE, "tensor_parallel_size": 8}, "enable_.* = 8, .* has 4 experts"),
        ("llama_plain", {"expert_parallel_size": 2}, "no experts"),
        ("llama_plain", WHOLE, "enable_expert_parallel, but the model has no experts"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(golden_dir, name, options, reason) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_hf_engine(golden_dir(name), options)


def test_padding_reaches_no_expert() -> None:
    rng = np.random.default_rng(0)
    weights = {
        "experts_gate_up": rng.standard_normal((3, 2, 8, 4)).astype(np.float32),
        "experts_down": rng.standard_normal((3, 4, 8)).astype(np.float32),
    }
    x = rng.standard_normal((3, 4)).astype(np.float32)
    chosen = Chosen(jnp.asarray([[0, 1], [1, 0], [2, 1]]), jnp.full((3, 2), 0.5))
    live = jnp.asarray([True, True, False])

    def run(weights, x):
        experts = Experts(jax.tree.map(jnp.asarray, weights), ActivatedGate("silu"))
        mapped = jax.shard_map(
            lambda x: experts.partial(x, chosen, live),
            mesh=make_mesh(),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return np.asarray(jax.jit(mapped)(jnp.asarray(x)))

    plain = run(weights, x)
    poisoned = {name: weight.copy() for name, weight in weights.items()}
    for weight in poisoned.values():
        weight[2] = np.nan
    x[2] = np.nan
    np.testing.assert_array_equal(run(poisoned, x), plain)
    assert not plain[2].any()
    assert plain[:2].any(axis=1).all()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 of num_local_experts = 4"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers must be layer numbers"),
        ("qwen2_moe", {"n_group": 2}, "does not implement n_group"),
        ("deepseek_v2_lite", {"norm_topk_prob": True}, "norm_topk_prob = true has no agreed"),
        ("deepseek_v2_lite", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek_v2_lite", {"num_key_value_heads": 2}, "one key and one value for every head"),
        ("deepseek_v2_lite", {"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        ("deepseek_v2_lite", {"mlp_bias": True}, "does not implement mlp_bias"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3 must divide 8 experts"),
        ("deepseek_v3", {"topk_group": 1}, "cannot give num_experts_per_tok = 3"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("gpt_oss", {"layer_types": None, "sliding_window": None}, "sliding_window is null"),
    ],
)
def test_what_the_family_does_not_do_is_refused_by_name(golden_dir, name, changes, message) -> None:
    config = json.loads((golden_dir(name) / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        find_policy({**config, **changes}, {})


def test_every_key_but_the_sizes_has_the_class_default(golden_dir) -> None:
    wanted = ("architectures", "vocab_size", "hidden_size", "intermediate_size")
    layers = ("num_hidden_layers", "num_attention_heads", "num_experts_per_tok")
    for name in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2_lite", "gpt_oss"):
        config = json.loads((golden_dir(name) / "config.json").read_text())
        config = {key: config[key] for key in (*wanted, *layers)}
        config["num_attention_heads"] = 16
        assert find_policy(config, {}).policy.config.router.top_k == config["num_experts_per_tok"]


def test_the_bias_of_the_choice_stays_float32(golden_dir) -> None:
    loaded = load_model(describe(open_checkpoint(golden_dir("deepseek_v3"))), "bfloat16")
    layer = loaded.weights["layers"][1]
    assert layer["choice_bias"].dtype == jnp.float32
    assert layer["router"].dtype == loaded.model.dtype == jnp.bfloat16


def test_hf_config_is_read_strictly_for_experts() -> None:
    config = {"architectures": ["MixtralForCausalLM"], "num_local_experts": True}
    with pytest.raises(ConfigError, match="num_local_experts must be an integer"):
        find_policy(HFConfig(config).raw, {})
