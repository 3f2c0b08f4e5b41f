"""Config switches that the golden fixtures leave alone give transformers' numbers too."""

from pathlib import Path

import numpy as np
import pytest

from jaxgen.engine.build import build_hf_engine

OPTIONS = Path(__file__).parents[1] / "fixtures" / "options"
TOLERANCE = 2e-4


@pytest.mark.parametrize("folder", sorted(OPTIONS.glob("*/")), ids=lambda folder: folder.name)
def test_an_option_does_what_it_does_in_transformers(folder):
    expected = np.load(folder / "expected.npz")
    engine = build_hf_engine(
        folder,
        {
            "dtype": "float32",
            "tensor_parallel_size": 4,
            "max_num_seqs": 1,
            "max_num_batched_tokens": len(expected["prompt"]),
            "num_gpu_blocks_override": 8,
            "block_size": 16,
        },
    )
    logits = engine.put([0], [expected["prompt"]], all_logits=True)
    np.testing.assert_allclose(logits, expected["logits"], atol=TOLERANCE, rtol=0)
