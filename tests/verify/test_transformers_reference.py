"""Beside transformers: a right model is verified, a wrong one is told by its first wrong layer."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from jaxgen.cli import main
from jaxgen.commands import verify
from jaxgen.verify.golden import read_recording
from jaxgen.verify.recording import Recording
from jaxgen.verify.transformers_reference import TransformersReference, first_layer_off

pytestmark = pytest.mark.filterwarnings("default")  # torch and transformers have their own

LAYER_1 = "model.layers.1.mlp.down_proj.weight"


def test_without_transformers_the_way_out_is_told(golden_dir, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["verify", str(golden_dir("llama_plain"))]) == 2
    error = capsys.readouterr().err
    assert "--golden" in error
    assert "pip install" in error


def test_first_layer_off_counts_from_the_embedding():
    truth = np.ones((4, 3, 8), np.float32)
    for state, name in ((0, "the embedding"), (1, "layer 0"), (3, "layer 2")):
        wrong = truth.copy()
        wrong[state:, 1] += 0.5
        assert first_layer_off(wrong, truth, 1e-3).startswith(name)
    assert first_layer_off(truth, truth, 1e-3).startswith("none")


def test_layers_are_compared_where_it_diverges(golden_dir, monkeypatch, capsys):
    """A reference whose fourth generated token is another: what led to it was its own three."""
    golden = golden_dir("llama_plain")
    recording = read_recording(golden / "expected.npz", narrow=False)
    prompt = recording.prompts[0]
    greedy = prompt.greedy.copy()
    greedy[3] += 1
    asked = []

    class Scripted:
        def __init__(self, model):
            pass

        def record(self, prompts, *, narrow):
            return Recording("a script", [replace(prompt, greedy=greedy)], exact=True)

        def hidden_states(self, ids):
            asked.append(ids.tolist())
            return np.zeros((3, len(ids), 1), np.float32)

    monkeypatch.setattr(verify, "TransformersReference", Scripted)
    assert main(["verify", str(golden), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["first_divergence"]["generated"]
    assert report["first_divergence"]["position"] == 3
    assert report["first_layer"].startswith("the embedding")
    assert asked == [[*prompt.ids.tolist(), *greedy[:3].tolist()]]


@pytest.mark.parametrize("name", ["llama_plain", "qwen3", "falcon_alibi", "exaone4_5_text"])
def test_right_models_are_verified(golden_dir, name, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert main(["verify", str(golden_dir(name)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verified"]
    assert len(report["prompts"]) == 4


def test_the_first_wrong_layer_is_named(golden_dir, wrong_llama, monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    wrong = wrong_llama(LAYER_1)
    monkeypatch.setattr(verify, "TransformersReference", lambda _: TransformersReference(wrong))
    assert main(["verify", str(golden_dir("llama_plain")), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["first_layer"].startswith("layer 1 ")
    assert report["first_divergence"]["prompt"] == 0
    assert report["first_divergence"]["position"] == 0
