"""Phi-3: the names and rules of longrope, and sequences that outgrow the shorter context."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxgen.engine.build import build_hf_engine
from jaxgen.ragged.buckets import Buckets
from jaxgen_checkpoints.errors import ConfigError
from jaxgen_models.hf_config import HFConfig
from jaxgen_models.phi3.policy import Phi3Policy

BOUNDARY = 36


@pytest.fixture(scope="module")
def config(golden_dir: Callable[[str], Path]) -> dict:
    return json.loads((golden_dir("phi3_longrope") / "config.json").read_text())


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_old_names_mean_longrope(config: dict, name: str) -> None:
    old = {**config, "rope_scaling": {**config["rope_scaling"], "type": name}}
    assert Phi3Policy.read_config(HFConfig(old)) == Phi3Policy.read_config(HFConfig(config))


def test_the_boundary_follows_from_the_config(config: dict) -> None:
    assert Phi3Policy.read_config(HFConfig(config)).recompute_at == BOUNDARY
    plain = {**config, "rope_scaling": None}
    assert Phi3Policy.read_config(HFConfig(plain)).recompute_at is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}, "expected 8"),
        ({"type": "linear", "factor": 2.0}, "linear"),
    ],
)
def test_rope_that_the_family_has_not_got_is_refused(
    config: dict, change: dict, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Phi3Policy.read_config(HFConfig({**config, "rope_scaling": change}))


def test_put_computes_a_sequence_anew_once_it_outgrows_the_boundary(
    golden_dir: Callable[[str], Path],
) -> None:
    folder = golden_dir("phi3_longrope")
    expected = np.load(folder / "expected.npz")
    index = next(i for i in range(6) if len(expected[f"prompt_{i}"]) == 64)
    prompt, logits = expected[f"prompt_{index}"], expected[f"logits_{index}"]
    engine = build_hf_engine(
        folder,
        {"dtype": "float32", "max_num_seqs": 1, "max_num_batched_tokens": 32, "block_size": 16},
        policy=Phi3Policy,
    )
    shape = engine.buckets.mixed[-1]
    engine.buckets = Buckets((shape,), (shape,))  # one compile for all pieces
    free = engine.free_blocks
    for first, last in ((0, 30), (30, BOUNDARY), (BOUNDARY, 37), (37, 64)):
        got = engine.put([7], [prompt[first:last]], all_logits=True)
    np.testing.assert_allclose(got, logits[37:], atol=2e-4)
    engine.flush(7)
    assert engine.free_blocks == free
