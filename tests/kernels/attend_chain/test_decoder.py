"""Decoders whose layers attend where their chain begins: the numbers of transformers, by the
operation's reference.
"""

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
    "name",
    [
        "qwen2",  # with a bias
        pytest.param("qwen3", marks=pytest.mark.slow),  # norms of heads
        pytest.param("mistral_swa", marks=pytest.mark.slow),
    ],
)
def test_golden_logits(name, golden_dir, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(chain, "has_kernel", lambda *_: True)
    monkeypatch.setattr(chain, "attends", lambda *_, **options: bool(asked.append(options)) or True)
    engine = build_hf_engine(golden_dir(name), OPTIONS)
    with np.load(golden_dir(name) / "expected.npz") as stored:
        prompt, wanted = stored["prompt_1"].tolist(), stored["logits_1"]
    got = engine.put([0], [prompt], all_logits=True)
    assert asked
    np.testing.assert_allclose(got, wanted, atol=2e-4, rtol=0)
