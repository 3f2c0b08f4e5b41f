"""The likelihoods that lm-eval reads off our server are those of transformers' own logits.

lm-eval itself asks, as its wheel has it: without its dependencies, which weigh 700 MB and are for
its data sets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import from_index
from tests.serving.live import post

CLIENT = Path(__file__).with_name("lm_eval_client.py")
WHEEL = "lm-eval==0.4.13"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """lm-eval's wheel, from which Python imports as it is; skips where no index is reached."""
    folder = tmp_path_factory.mktemp("lm_eval")
    from_index(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), WHEEL]
    )
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def recorded(golden_dir):
    """(ids, log-probabilities of the whole vocabulary behind each) of the recorded prompts."""
    held = np.load(golden_dir("llama_plain") / "expected.npz")
    found = []
    for place in range(1, int(held["n_prompts"])):
        logits = held[f"logits_{place}"].astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        found.append((held[f"prompt_{place}"].tolist(), logprobs))
    return found


@pytest.fixture(scope="module")
def cases(recorded):
    """(ids, log-probabilities, where the continuation begins)."""
    return [(ids, logprobs, cut) for ids, logprobs in recorded for cut in {1, len(ids) // 2}]


@pytest.fixture(scope="module")
def told(wheel, served, golden_dir, cases):
    """What lm-eval makes of the server's answers; it asks for several prompts at once."""
    held = np.load(golden_dir("llama_plain") / "expected.npz")
    truth = [held["prompt_1"].tolist(), held["greedy_1"].tolist()]
    options = {"base_url": f"{served.base_url}/v1/completions", "model": "llama", "max_length": 96}
    asked = {
        "options": options | {"batch_size": 3, "num_concurrent": 2},
        "tokens": [*([ids[:cut], ids[cut:]] for ids, _, cut in cases), truth],
        "texts": [["Hello, ", "world"], ["", "a b c"]],
        "rolling": [["a b c"]],
        "until": [["The capital of", {"until": ["\n\n\n"], "max_gen_toks": 6}]],
    }
    done = subprocess.run(
        [sys.executable, str(CLIENT)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(wheel)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def likelihood(ids, logprobs, context):
    """(of what follows the context, whether it is what greedy decoding writes)."""
    places = range(context, len(ids))
    greedy = all(int(logprobs[place - 1].argmax()) == ids[place] for place in places)
    return [sum(logprobs[place - 1][ids[place]] for place in places), greedy]


def test_likelihoods_are_those_of_the_reference(told, cases):
    *found, (_, greedy) = told["tokens"]
    assert greedy is True  # transformers' own greedy continuation
    assert len(found) == len(cases)
    for (value, greedy), (ids, logprobs, cut) in zip(found, cases, strict=True):
        expected = likelihood(ids, logprobs, cut)
        assert value == pytest.approx(expected[0], abs=1e-3)
        assert greedy is expected[1]


def test_texts_go_through_the_servers_own_tokenizer(told, served, tokenizer):
    assert told["backend"] == "remote"
    assert all(value < 0 for value, _ in told["texts"])
    assert told["rolling"] == [pytest.approx(told["texts"][1][0], abs=1e-3)]
    prompt = tokenizer.encode("The capital of", add_special_tokens=False)
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 6}
    whole = post(served, "/v1/completions", body).json()
    assert told["until"] == [whole["choices"][0]["text"]]


def test_a_stream_echoes_the_same_logprobs(served, recorded):
    ids, logprobs = recorded[1]
    body = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
    whole = post(served, "/v1/completions", body).json()["choices"][0]
    answer = post(served, "/v1/completions", body | {"stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    pieces = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name, expected in whole["logprobs"].items():
        told = [entry for piece in pieces for entry in (piece["logprobs"] or {}).get(name, ())]
        assert told == expected, name
    wanted = [logprobs[place - 1][ids[place]] for place in range(1, len(ids))]
    assert whole["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(wanted, abs=1e-3)
    only = post(served, "/v1/completions", body | {"stream": True, "max_tokens": 0}).text
    first, *rest = [
        json.loads(line[6:]) for line in only.splitlines() if line.startswith("data: {")
    ]
    assert len(first["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert [piece["choices"][0]["text"] for piece in rest] == [""]
