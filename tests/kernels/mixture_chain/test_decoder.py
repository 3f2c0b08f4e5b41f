"""Decoders whose layers with experts are chained: the numbers of transformers, token by token."""

import numpy as np
import pytest

from jaxgen.engine.build import build_hf_engine
from jaxgen_models.layers import mixture_chain

OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "block_size": 8,
    "max_model_len": 96,
    "num_gpu_blocks_override": 24,
}


@pytest.mark.parametrize(
    ("name", "chains"),
    [
        ("deepseek_v2_lite", True),  # a dense layer before those with experts, and a shared expert
        pytest.param("qwen3_moe", True, marks=pytest.mark.slow),
        pytest.param("mixtral", True, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", False, marks=pytest.mark.slow),  # a bias decides
        pytest.param("qwen2_moe", False, marks=pytest.mark.slow),  # biases, a gate
        pytest.param("gpt_oss", False, marks=pytest.mark.slow),
    ],
)
def test_golden_logits(name, chains, golden_dir, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        mixture_chain, "has_kernel", lambda *arguments: bool(asked.append(arguments)) or True
    )
    engine = build_hf_engine(golden_dir(name), OPTIONS)
    with np.load(golden_dir(name) / "expected.npz") as stored:
        prompt, wanted = stored["prompt_1"].tolist(), stored["logits_1"]
    got = engine.put([0], [prompt[:-2]], all_logits=True)
    assert not asked  # it is for one token
    alone = [engine.put([0], [[token]], all_logits=True) for token in prompt[-2:]]
    assert bool(asked) == chains
    np.testing.assert_allclose(np.concatenate([got, *alone]), wanted, atol=2e-4, rtol=0)
