"""What clients are told greedily is what `generate` writes and what transformers wrote.

Under load, with a KV cache that forces preemption and one that does not, with cached prefixes and
without.
"""

import asyncio
import json
from dataclasses import dataclass

import httpx
import numpy as np
import pytest

from jaxgen.llm import LLM
from jaxgen.ragged.buckets import Buckets
from jaxgen.sampling import SamplingParams
from jaxgen.serving.app import create_app
from jaxgen.serving.async_engine import AsyncEngine
from tests.serving.live import live

ROUNDS = 2
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 16,
    "max_model_len": 128,
}
matrix = pytest.mark.parametrize("prefixes", [True, False], ids=["prefix cache", "no prefix cache"])
TINY, LARGE = pytest.param(12, id="tiny"), pytest.param(128, id="large")


@dataclass
class Case:
    """A prompt and the ids that transformers' greedy search wrote behind it."""

    prompt: list[int]
    ids: list[int]


def load(model, *, prefixes, blocks) -> LLM:
    """An LLM whose steps all have one shape: one compile."""
    options = {"enable_prefix_caching": prefixes, "num_gpu_blocks_override": blocks}
    llm = LLM(model, **OPTIONS, **options)
    shape = llm.engine.buckets.mixed[-1]
    llm.engine.buckets = Buckets((shape,), (shape,))
    return llm


async def ask(client, case, *, stream):
    """The ids and the text that the server tells of."""
    body = {"prompt": case.prompt, "temperature": 0, "max_tokens": len(case.ids)}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": stream}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        return choice["token_ids"], choice["text"]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    pieces = [json.loads(event)["choices"][0] for event in events]
    ids = [token for piece in pieces for token in piece["token_ids"]]
    return ids, "".join(piece["text"] for piece in pieces)


async def ask_all(base_url, cases):
    """Everything at once, several times; every other request is a stream."""
    async with httpx.AsyncClient(base_url=base_url, timeout=600) as client:
        several = [(case, place % 2 == 0) for place, case in enumerate(cases * ROUNDS)]
        return await asyncio.gather(*(ask(client, case, stream=s) for case, s in several))


def check(model, cases, *, prefixes, blocks):
    llm = load(model, prefixes=prefixes, blocks=blocks)
    most = max(len(case.ids) for case in cases)
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    written = llm.generate([case.prompt for case in cases], params)
    for case, output in zip(cases, written, strict=True):
        assert output.outputs[0].token_ids[: len(case.ids)] == case.ids
    engine = AsyncEngine.of(llm, name="model")
    before = engine.stats()
    with live(create_app(engine)) as server:
        answers = asyncio.run(ask_all(server.base_url, cases))
        after = engine.stats()
    for place, (ids, text) in enumerate(answers):
        output = written[place % len(cases)]
        assert ids == cases[place % len(cases)].ids
        assert text == output.outputs[0].text
    assert (after.preemptions > before.preemptions) is (blocks == 12)
    assert (after.prefix_hits > before.prefix_hits) is prefixes
    assert after.kv_used_blocks == 0


@matrix
@pytest.mark.parametrize("blocks", [TINY, pytest.param(128, id="large", marks=pytest.mark.slow)])
def test_a_tiny_model(golden_dir, prefixes, blocks):
    held = np.load(golden_dir("llama_plain") / "expected.npz")
    cases = [
        Case(held[f"prompt_{place}"].tolist(), held[f"greedy_{place}"].tolist())
        for place in range(1, int(held["n_prompts"]))
    ]
    check(golden_dir("llama_plain"), cases, prefixes=prefixes, blocks=blocks)


@pytest.mark.slow
@matrix
@pytest.mark.parametrize("blocks", [TINY, LARGE])
def test_smollm2(smollm2_gguf, smollm2_expected, prefixes, blocks):
    recorded = json.loads((smollm2_expected / "expected.json").read_text())["prompts"]
    cases = [Case(each["ids"], each["f32_dequant"]["greedy_ids"]) for each in recorded]
    check(smollm2_gguf, cases, prefixes=prefixes, blocks=blocks)
