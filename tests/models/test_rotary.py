"""Tokens turn as in transformers, far from the beginning too."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen_models.hf_config import HFConfig
from jaxgen_models.layers.rotary import rotary
from jaxgen_models.rope_config import read_rope

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES = json.loads((FIXTURES / "rope_frequencies.json").read_text())
"""Inverse frequencies of transformers 5.24 (torch, float32) for heads of a size."""

POSITION = 100_000


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["rope"]["rope_type"])
def test_the_angle_of_a_far_token(case):
    """A frequency that is off by one unit in the last place turns it by up to 0.01."""
    config = HFConfig({"rope_parameters": case["rope"]}, "config.json")
    rope = read_rope(config, case["head_dim"], case["positions"])
    at = jnp.array([POSITION])
    turned = rotary(rope, at, at + 1)
    frequencies = np.array(case["frequencies"], np.float32)
    angles = np.float32(POSITION) * frequencies
    same = np.isclose(turned.cos[0], rope.attention_factor * np.cos(angles), rtol=0, atol=1e-6)
    assert np.mean(same) > 0.95
    off = np.abs(np.asarray(turned.sin[0]) - rope.attention_factor * np.sin(angles))
    assert np.all(off < 0.01)
