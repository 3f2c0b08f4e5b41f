"""The softmax scale of DeepSeek's own checkpoints, as their authors' code computes it."""

import json

import pytest

from jaxgen_models.registry import find_policy

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
SIZES = {
    "max_position_embeddings": 163840,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
PLAIN = 192**-0.5


@pytest.mark.parametrize(
    ("family", "scaling", "scale"),
    [
        ("deepseek_v3", YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, 0.1352337788608801),
        ("deepseek_v3", YARN | {"mscale": 0, "mscale_all_dim": 0}, PLAIN),
        ("deepseek_v3", None, PLAIN),
        ("deepseek_v2_lite", YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, 0.1147213867929261),
    ],
)
def test_yarn_stretches_the_softmax_too(golden_dir, family, scaling, scale):
    """At position 0 nothing of it is to be seen; without it scores are 1.6 times too small."""
    config = json.loads((golden_dir(family) / "config.json").read_text()) | SIZES
    read = find_policy(config | {"rope_scaling": scaling}, {}).policy.config
    assert read.attention_scale == pytest.approx(scale, rel=1e-9)
