"""A real model: SmolLM2-135M-Instruct as GGUF says what transformers says, token for token."""

import json

import pytest

from jaxgen.llm import LLM
from jaxgen.ragged.buckets import Buckets
from jaxgen.sampling import SamplingParams

pytestmark = pytest.mark.newest
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(smollm2_expected):
    return json.loads((smollm2_expected / "expected.json").read_text())["prompts"]


def load(gguf, shards=1):
    """All prompts at once, every step of one shape: one compile of thirty layers."""
    llm = LLM(
        gguf,
        dtype="float32",
        tensor_parallel_size=shards,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        block_size=16,
        max_model_len=128,
    )
    shape = llm.engine.buckets.mixed[-1]
    llm.engine.buckets = Buckets((shape,), (shape,))
    return llm


@pytest.fixture(scope="module")
def llm(smollm2_gguf):
    return load(smollm2_gguf)


def test_continuations_of_the_first_prompts(llm, expected):
    """Of text: ids and text out, and the end token where it ends."""
    chosen = expected[:3]
    half = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    ending = SamplingParams(temperature=0, max_tokens=64)
    texts = [prompt["text"] for prompt in (*chosen, chosen[0])]
    *outputs, ended = llm.generate(texts, [half] * len(chosen) + [ending])
    for prompt, output in zip(chosen, outputs, strict=True):
        assert output.prompt_token_ids == prompt["ids"]
        assert output.outputs[0].token_ids == prompt["f32_dequant"]["greedy_ids"][:32]
    until = chosen[0]["f32_dequant"]["eos_position"]
    assert ended.outputs[0].token_ids == chosen[0]["f32_dequant"]["greedy_ids"][: until + 1]
    assert ended.outputs[0].text == chosen[0]["f32_dequant"]["text_until_eos"]


@pytest.mark.slow
def test_all_continuations(llm, expected):
    outputs = llm.generate([prompt["ids"] for prompt in expected], GREEDY)
    for prompt, output in zip(expected, outputs, strict=True):
        assert output.outputs[0].token_ids == prompt["f32_dequant"]["greedy_ids"], prompt["ids"]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_all_continuations_on_a_mesh(smollm2_gguf, expected, shards):
    """Nine query heads over three KV heads: neither number divides by the mesh."""
    outputs = load(smollm2_gguf, shards).generate([prompt["ids"] for prompt in expected], GREEDY)
    for prompt, output in zip(expected, outputs, strict=True):
        assert output.outputs[0].token_ids == prompt["f32_dequant"]["greedy_ids"], prompt["ids"]
