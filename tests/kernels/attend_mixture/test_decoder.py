"""Decoders whose layers with experts attend where their chain begins: the numbers of transformers,
token by token, by the operation's reference.
"""

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
    ("name", "attends"),
    [
        ("qwen3_moe", True),  # norms of heads
        pytest.param("mixtral", True, marks=pytest.mark.slow),
        pytest.param("deepseek_v2_lite", False, marks=pytest.mark.slow),  # latents
    ],
)
def test_golden_logits(name, attends, golden_dir, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(mixture_chain, "has_kernel", lambda *_: True)
    monkeypatch.setattr(
        mixture_chain, "attends", lambda *_, **options: bool(asked.append(options)) or True
    )
    engine = build_hf_engine(golden_dir(name), OPTIONS)
    with np.load(golden_dir(name) / "expected.npz") as stored:
        prompt, wanted = stored["prompt_1"].tolist(), stored["logits_1"]
    got = engine.put([0], [prompt[:-2]], all_logits=True)
    alone = [engine.put([0], [[token]], all_logits=True) for token in prompt[-2:]]
    assert bool(asked) == attends
    np.testing.assert_allclose(np.concatenate([got, *alone]), wanted, atol=2e-4, rtol=0)
