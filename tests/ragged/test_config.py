"""The engine's configuration as users of DeepSpeed and vLLM write it, and how it is refused."""

import re

import ml_dtypes
import numpy as np
import pytest

from jaxgen.config import EngineConfig, KVMemory
from jaxgen_checkpoints.errors import ConfigError

DEEPSPEED = {
    "tensor_parallel": {"tp_size": 2},
    "state_manager": {
        "max_tracked_sequences": 64,
        "max_ragged_batch_size": 96,
        "max_ragged_sequence_count": 32,
        "max_context": 4096,
        "memory_config": {"mode": "allocate", "size": 500},
        "offload": False,
    },
    "quantization": {"quantization_mode": None},
}


def test_spellings_agree():
    aliases = {
        "tp": DEEPSPEED["tensor_parallel"],
        "manager": DEEPSPEED["state_manager"],
        "quantization": None,
    }
    flat_deepspeed = {"tp_size": 2, **DEEPSPEED["state_manager"]}
    vllm = {
        "tensor_parallel_size": 2,
        "max_tracked_sequences": 64,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 32,
        "max_model_len": 4096,
        "num_gpu_blocks_override": 500,
    }
    wanted = EngineConfig(
        tensor_parallel_size=2,
        max_tracked_sequences=64,
        max_num_batched_tokens=96,
        max_num_seqs=32,
        max_model_len=4096,
        kv_memory=KVMemory(num_blocks=500),
    )
    for spelling in (DEEPSPEED, aliases, flat_deepspeed, vllm, wanted):
        assert EngineConfig.from_any(spelling) == wanted
    assert EngineConfig.from_any(None, **vllm) == wanted
    assert EngineConfig.from_any(DEEPSPEED, tensor_parallel_size=2, dtype=None) == wanted
    assert EngineConfig.from_any() == EngineConfig()


def test_an_engine_config_is_overridden():
    base = EngineConfig(max_num_seqs=4)
    assert EngineConfig.from_any(base, max_num_seqs=8, seed=None) == EngineConfig(max_num_seqs=8)
    changed = EngineConfig.from_any(base, kv_cache_memory_bytes=1 << 20)
    assert changed.kv_memory == KVMemory(cache_bytes=1 << 20)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("auto", "auto"),
        ("half", "float16"),
        ("float", "float32"),
        (np.float32, "float32"),
        (np.dtype("float16"), "float16"),
        (ml_dtypes.bfloat16, "bfloat16"),
    ],
)
def test_dtypes(given, name):
    assert EngineConfig.from_any({"dtype": given}).dtype == name


def test_reserve_mode_counts_free_bytes():
    reserve = {"memory_config": {"mode": "reserve"}}
    assert EngineConfig.from_any(reserve).kv_memory.reserve_bytes == 1_000_000_000
    assert EngineConfig.from_any(memory_config={"size": 5}).kv_memory.reserve_bytes == 5


def test_limits_that_were_not_given_adapt():
    assert EngineConfig.from_any(max_num_batched_tokens=100).max_num_seqs == 100
    assert EngineConfig.from_any(max_num_seqs=4000).max_num_batched_tokens == 4000
    assert EngineConfig.from_any(max_num_seqs=4000).max_tracked_sequences == 4000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seq": 1}, "Unknown engine option 'max_num_seq': did you mean 'max_num_seqs'?"),
        (
            {"state_manager": {"max_contxt": 1}},
            "Unknown engine option 'state_manager.max_contxt': did you mean 'max_context'?",
        ),
        (
            {"tensor_parallel": {"tp_size": 2}, "tp_size": 4},
            "tensor_parallel.tp_size=2 and tp_size=4 set the same thing differently",
        ),
        (
            {"max_context": 8, "max_model_len": 9},
            "max_context=8 and max_model_len=9 set the same thing differently",
        ),
        ({"tensor_parallel": 2}, "tensor_parallel must be a dict with keys tp_size; got 2"),
        ({"tp_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer, got True"),
        ({"max_num_seqs": "8"}, "max_num_seqs must be an integer, got '8'"),
        ({"max_tracked_sequences": -1}, "max_tracked_sequences must be at least 1, got -1"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"enforce_eager": 1}, "enforce_eager must be true or false"),
        ({"enable_expert_parallel": 2}, "enable_expert_parallel must be true or false, got 2"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be true or false, got 'no'"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs must be at least 1, got 0"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must lie in (0, 1], got 1.5"),
        ({"offload": True}, "offload=True is refused"),
        ({"manager": {"offload": True}}, "manager.offload=True is refused"),
        (
            {"quantization": {"quantization_mode": "wf6af16"}},
            "quantization.quantization_mode='wf6af16' is refused",
        ),
        ({"quantization": "awq"}, "quantization='awq' is refused"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            "max_num_seqs (max_ragged_sequence_count) must not exceed max_num_batched_tokens",
        ),
        (
            {"max_num_seqs": 9, "max_tracked_sequences": 8},
            "must not exceed max_tracked_sequences, got 9 and 8",
        ),
        (
            {"num_gpu_blocks_override": 9, "kv_cache_memory_bytes": 8},
            "size is given 2 times, by num_gpu_blocks_override and by kv_cache_memory_bytes",
        ),
        (
            {"memory_config": {"mode": "reserve"}, "gpu_memory_utilization": 0.5},
            "memory_config.mode='reserve' and gpu_memory_utilization=0.5 both size the KV cache",
        ),
        ({"memory_config": {"mode": "all"}}, "memory_config.mode must be one of reserve, allocate"),
        ({"memory_config": {"mode": "allocate"}}, "needs memory_config.size"),
        (
            {"memory_config": {"mode": "allocate", "size": 5}, "num_gpu_blocks_override": 6},
            "num_gpu_blocks_override=6 and memory_config.size=5 set the same thing differently",
        ),
        ([], "engine_config must be a dict or an EngineConfig, got list"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig.from_any(given)


def test_a_keyword_beside_a_dict_must_agree():
    with pytest.raises(ConfigError, match="max_num_seqs=4 and max_num_seqs=5"):
        EngineConfig.from_any({"max_num_seqs": 4}, max_num_seqs=5)
