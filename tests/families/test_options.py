"""Config switches that the golden fixtures leave alone give transformers' numbers too."""

from pathlib import Path

import numpy as np
import pytest

from jaxgen.engine.build import build_hf_engine

OPTIONS = Path(__file__).parents[1] / "fixtures" / "options"
TOLERANCE = 2e-4
# What their layers are made of, the golden fixtures have too.
OF_KNOWN_PARTS = (
    *("cohere_normed_heads_biased", "deepseek_v2_low_rank_biased", "gemma2_biased_listed_layers"),
    *("gpt_oss_unbiased_cut_low", "granite_biased", "olmo2_biased_few_keys"),
    *("qwen2_moe_dense_between_sliding_unbiased", "qwen3_moe_dense_between_sliding_biased"),
)


def folders() -> list[object]:
    """Every fixture; those whose layers are made of known parts are for the newest JAX."""
    return [
        pytest.param(
            folder,
            id=folder.name,
            marks=[pytest.mark.newest] if folder.name in OF_KNOWN_PARTS else [],
        )
        for folder in sorted(OPTIONS.glob("*/"))
    ]


@pytest.mark.parametrize("folder", folders())
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
