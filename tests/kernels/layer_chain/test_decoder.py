"""Decoders whose layers are chained: the numbers of transformers, with the chain's reference."""

import numpy as np
import pytest

from jaxgen.engine.build import build_hf_engine
from jaxgen_models.layers import chain

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
        ("qwen2", True),  # with a bias
        pytest.param("llama_tied", True, marks=pytest.mark.slow),
        pytest.param("qwen3", True, marks=pytest.mark.slow),
        pytest.param("mistral_swa", True, marks=pytest.mark.slow),
        pytest.param("llama_bias_headdim", False, marks=pytest.mark.slow),
        pytest.param("granite", False, marks=pytest.mark.slow),
        pytest.param("mixtral", False, marks=pytest.mark.slow),
    ],
)
def test_golden_logits(name, chains, golden_dir, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        chain, "has_kernel", lambda *arguments: bool(asked.append(arguments)) or True
    )
    engine = build_hf_engine(golden_dir(name), OPTIONS)
    with np.load(golden_dir(name) / "expected.npz") as stored:
        prompt, wanted = stored["prompt_1"].tolist(), stored["logits_1"]
    got = engine.put([0], [prompt], all_logits=True)
    assert bool(asked) == chains
    np.testing.assert_allclose(got, wanted, atol=2e-4, rtol=0)
