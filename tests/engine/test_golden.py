"""The numbers of transformers, whichever way they come: whole, chunked, batched, preempted.

One engine a fixture, compiled once for putting and once for sampling.
"""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.engine.loop import GenerationLoop
from jaxgen.engine.programs import Draw, Forward, Kind
from jaxgen.sampling import Demand, SamplingParams

GOLDEN = Path(__file__).resolve().parents[1] / "fixtures" / "golden"
# Rotation depends on the prompt's length, which `put` learns from its first piece.
WHOLE_PROMPTS = ("llama_dynamic", "phi3_longrope", "qwen_v1")
LOGITS = 2e-4
LOGPROBS = 1e-4
LONGEST = 4  # index of the prompt with 64 tokens
SHAPES_OF_LOGITS = ("llama_bias_headdim", "qwen2_tied_swa")  # `put`'s other end, a compile each


def fixtures() -> list[object]:
    """Every fixture; those of an architecture that an earlier one has are for the newest JAX."""
    params, known = [], set()
    for config in sorted(GOLDEN.glob("*/config.json")):
        (architecture,) = json.loads(config.read_text())["architectures"]
        marks = [pytest.mark.newest] if architecture in known else []
        known.add(architecture)
        params.append(pytest.param(config.parent.name, marks=marks))
    return params


@pytest.fixture(scope="module", params=fixtures())
def case(request, golden, one_shape):
    numbers = golden(request.param)
    engine = one_shape(numbers.folder)
    (bucket,) = engine.buckets.mixed
    programs = [Forward(bucket), Forward(bucket, Kind.ALL_LOGITS), Draw(bucket.rows, Demand.ANY)]
    engine.runner.warm_up(programs)  # in parallel
    return SimpleNamespace(name=request.param, golden=numbers, engine=engine)


def put_in_chunks(engine, uid, prompt, *cuts):
    """Logits at every position of a prompt that is put in pieces, cut at the given places."""
    bounds = [0, *cuts, len(prompt)]
    pieces = [
        engine.put([uid], [prompt[begin:end]], all_logits=True)
        for begin, end in itertools.pairwise(bounds)
    ]
    engine.flush(uid)
    return np.concatenate(pieces)


def test_logits_at_every_position(case):
    for number, (prompt, expected) in enumerate(
        zip(case.golden.prompts, case.golden.logits, strict=True)
    ):
        got = put_in_chunks(case.engine, number, prompt)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, atol=LOGITS, rtol=0)


def test_greedy_tokens_and_their_likeliest_rivals(case, generate):
    """All prompts at once: their 190 tokens are split over steps of 64, fused with decodes."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=5)
    outputs = generate(case.engine, case.golden.prompts, params)
    for number, output in enumerate(outputs):
        completion = output.outputs[0]
        assert completion.token_ids == case.golden.greedy[number], f"prompt {number}"
        if case.golden.top_ids is None:
            continue
        ids = [[token for token, _ in position.top] for position in completion.logprobs]
        values = [[value for _, value in position.top] for position in completion.logprobs]
        np.testing.assert_array_equal(ids, case.golden.top_ids[number])
        np.testing.assert_allclose(values, case.golden.top_logprobs[number], atol=LOGPROBS, rtol=0)
        assert [position.logprob for position in completion.logprobs] == [
            position.top[0][1] for position in completion.logprobs
        ]


def test_alone_as_in_company(case, tokens):
    for prompt, expected in zip(case.golden.prompts, case.golden.greedy, strict=True):
        assert tokens(case.engine, [prompt]) == [expected]


def test_preempted_requests_go_on_where_they_were(case, preempted, take_every_block):
    """Some steps on, somebody else takes every free block, until two requests were sent back."""
    engine = case.engine
    loop = GenerationLoop(engine)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = [
        loop.submit(str(number), prompt, params)
        for number, prompt in enumerate(case.golden.prompts)
    ]
    for _ in range(6):
        loop.step()
    hogs = take_every_block(engine)
    while loop.has_unfinished:
        loop.step()
        engine.state.check()
        if len(preempted) >= 2:
            while hogs:
                engine.flush(hogs.pop())
    assert len(preempted) >= 2
    assert [output.outputs[0].token_ids for output in outputs] == case.golden.greedy
    assert len(engine.state) == 0


def test_chunked_prompts_have_the_same_logits(case):
    """Dynamic NTK is exempt: a sequence's base follows from the prompt that it began with."""
    if case.name in WHOLE_PROMPTS:
        return
    length = len(case.golden.prompts[LONGEST])
    everywhere = [(cut,) for cut in range(1, length)]
    some = [(1,), (7,), (8,), (9,), (length - 1,), (5, 6, 40)]
    for cuts in everywhere if case.name == "qwen2_tied_swa" else some:
        got = put_in_chunks(case.engine, 7, case.golden.prompts[LONGEST], *cuts)
        np.testing.assert_allclose(got, case.golden.logits[LONGEST], atol=LOGITS, rtol=0)


def test_logits_in_company(case):
    """Three prompts in one put, one of them continued, all in the caller's order."""
    engine, golden = case.engine, case.golden
    chunked = case.name not in WHOLE_PROMPTS
    first = 3 if chunked else len(golden.prompts[3])
    engine.put([3], [golden.prompts[3][:first]], all_logits=True)
    uids = [2, 3, 1] if chunked else [2, 1]
    given = {1: golden.prompts[1], 2: golden.prompts[2], 3: golden.prompts[3][first:]}
    got = engine.put(uids, [given[uid] for uid in uids], all_logits=True)
    expected = {1: golden.logits[1], 2: golden.logits[2], 3: golden.logits[3][first:]}
    whole = np.concatenate([expected[uid] for uid in uids])
    np.testing.assert_allclose(got, whole, atol=LOGITS, rtol=0)
    for uid in (1, 2, 3):
        engine.flush(uid)
    engine.state.check()


def test_put_gives_the_last_tokens_logits(case):
    if case.name not in SHAPES_OF_LOGITS:
        return
    got = case.engine.put([8, 9], [case.golden.prompts[3], case.golden.prompts[0]])
    expected = [case.golden.logits[3][-1], case.golden.logits[0][-1]]
    np.testing.assert_allclose(got, expected, atol=LOGITS, rtol=0)
    case.engine.flush(8)
    case.engine.flush(9)


BF16 = ("llama_tied", "qwen3")


@pytest.mark.parametrize("name", BF16)
def test_bfloat16_errs_no_more_than_twice_the_references_own(golden, one_shape, name):
    """The reference's own error is against float32; near ties its greedy tokens flip as well."""
    case = golden(name)
    recorded = json.loads((case.folder / "meta.json").read_text())["bf16"]
    engine = one_shape(case.folder, dtype="bfloat16")
    for uid, (prompt, expected) in enumerate(zip(case.prompts, case.logits, strict=True)):
        error = np.abs(put_in_chunks(engine, uid, prompt) - expected).max()
        assert 1e-3 < error <= 2 * recorded["max_abs_logit_err_per_prompt"][uid]
    assert engine.model.dtype == jnp.bfloat16
