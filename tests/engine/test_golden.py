"""The numbers of transformers, whichever way they come: whole, chunked, batched, preempted.

One engine a fixture, and one forward: what `put` gives is what generation draws from. The forward
that gives logits of every token is compiled for a few.
"""

import itertools
import json
from collections.abc import Sequence
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
ROWS, STEP = 6, 64  # sequences and tokens of a step, at most
KINDS_OF_LAYERS = (
    *("bloom", "deepseek_v3", "gemma2", "gpt_oss_mxfp4", "llama_tied", "mistral3"),
    *("opt_post_ln_proj", "phi", "phi3_longrope", "qwen2_moe", "qwen2_tied_swa", "qwen3"),
)
ALL_LOGITS = (*WHOLE_PROMPTS, "deepseek_v3", "gemma2", "gpt_oss", "qwen2_tied_swa")


def fixtures(chosen: Sequence[str], mark: pytest.MarkDecorator) -> list[object]:
    """Every fixture, those that are not chosen with the mark."""
    return [
        pytest.param(name, marks=[] if name in chosen else [mark])
        for name in sorted(config.parent.name for config in GOLDEN.glob("*/config.json"))
    ]


# Layers of the others are made of what these have. How requests share steps, leave and come back
# is a matter of what a kind of layer keeps of them.
each_kind_of_layer = pytest.mark.parametrize(
    "case",
    fixtures((*KINDS_OF_LAYERS, *WHOLE_PROMPTS), pytest.mark.slow),
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", params=fixtures(KINDS_OF_LAYERS, pytest.mark.newest))
def case(request, golden, one_shape):
    numbers = golden(request.param)
    engine = one_shape(numbers.folder)
    (bucket,) = engine.buckets.mixed
    kinds = [Kind.NEXT, Kind.ALL_LOGITS] if request.param in ALL_LOGITS else [Kind.NEXT]
    forwards = [Forward(bucket, kind) for kind in kinds]
    engine.runner.warm_up([*forwards, Draw(bucket.rows, Demand.ANY)])
    return SimpleNamespace(name=request.param, golden=numbers, engine=engine)


def put_in_chunks(engine, uid, prompt, *cuts, all_logits=True):
    """Logits of a prompt put in pieces, cut there: of every position, or of each piece's end."""
    bounds = [0, *cuts, len(prompt)]
    pieces = [
        engine.put([uid], [prompt[begin:end]], all_logits=all_logits)
        for begin, end in itertools.pairwise(bounds)
    ]
    engine.flush(uid)
    return np.concatenate(pieces)


def beginnings(prompts):
    """(prompt's number, length) of every beginning of every prompt, as many as fit into a step."""
    step, tokens = [], 0
    for number, prompt in enumerate(prompts):
        for length in range(1, len(prompt) + 1):
            if len(step) == ROWS or tokens + length > STEP:
                yield step
                step, tokens = [], 0
            step.append((number, length))
            tokens += length
    yield step


def test_logits_at_every_position(case):
    engine, golden = case.engine, case.golden
    if case.name in ALL_LOGITS:
        for number, (prompt, expected) in enumerate(
            zip(golden.prompts, golden.logits, strict=True)
        ):
            got = put_in_chunks(engine, number, prompt)
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, expected, atol=LOGITS, rtol=0)
        return
    for step in beginnings(golden.prompts):
        uids = range(len(step))
        got = engine.put(uids, [golden.prompts[number][:length] for number, length in step])
        assert got.dtype == np.float32
        expected = [golden.logits[number][length - 1] for number, length in step]
        np.testing.assert_allclose(got, expected, atol=LOGITS, rtol=0)
        for uid in uids:
            engine.flush(uid)


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


@pytest.mark.newest
@each_kind_of_layer
def test_alone_as_in_company(case, tokens):
    for number in (0, LONGEST):
        assert tokens(case.engine, [case.golden.prompts[number]]) == [case.golden.greedy[number]]


@pytest.mark.newest
@each_kind_of_layer
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


@pytest.mark.newest
def test_chunked_prompts_have_the_same_logits(case):
    """Dynamic NTK is exempt: a sequence's base follows from the prompt that it began with."""
    if case.name in WHOLE_PROMPTS:
        return
    prompt, expected = case.golden.prompts[LONGEST], case.golden.logits[LONGEST]
    everywhere = [(cut,) for cut in range(1, len(prompt))]
    some = [(1,), (7,), (8,), (9,), (len(prompt) - 1,), (5, 6, 40)]
    all_logits = case.name in ALL_LOGITS
    for cuts in everywhere if case.name == "qwen2_tied_swa" else some:
        ends = [end - 1 for end in (*cuts, len(prompt))]
        got = put_in_chunks(case.engine, 7, prompt, *cuts, all_logits=all_logits)
        wanted = expected if all_logits else expected[ends]
        np.testing.assert_allclose(got, wanted, atol=LOGITS, rtol=0)


@pytest.mark.newest
def test_logits_in_company(case):
    """Three prompts in one put, one of them continued, all in the caller's order."""
    engine, golden = case.engine, case.golden
    all_logits = case.name in ALL_LOGITS
    chunked = case.name not in WHOLE_PROMPTS
    first = 3 if chunked else len(golden.prompts[3])
    begun = engine.put([3], [golden.prompts[3][:first]])
    np.testing.assert_allclose(begun, golden.logits[3][first - 1 : first], atol=LOGITS, rtol=0)
    uids = [2, 3, 1] if chunked else [2, 1]
    given = {1: golden.prompts[1], 2: golden.prompts[2], 3: golden.prompts[3][first:]}
    got = engine.put(uids, [given[uid] for uid in uids], all_logits=all_logits)
    expected = {1: golden.logits[1], 2: golden.logits[2], 3: golden.logits[3][first:]}
    whole = np.concatenate([expected[uid][0 if all_logits else -1 :] for uid in uids])
    np.testing.assert_allclose(got, whole, atol=LOGITS, rtol=0)
    for uid in (1, 2, 3):
        engine.flush(uid)
    engine.state.check()


@pytest.mark.parametrize("name", ["llama_tied", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_bfloat16_errs_no_more_than_twice_the_references_own(golden, one_shape, name):
    """The reference's own error is against float32; near ties its greedy tokens flip as well."""
    case = golden(name)
    recorded = json.loads((case.folder / "meta.json").read_text())["bf16"]
    engine = one_shape(case.folder, dtype="bfloat16")
    for uid, (prompt, expected) in enumerate(zip(case.prompts, case.logits, strict=True)):
        error = np.abs(put_in_chunks(engine, uid, prompt) - expected).max()
        assert 1e-3 < error <= 2 * recorded["max_abs_logit_err_per_prompt"][uid]
    assert engine.model.dtype == jnp.bfloat16
