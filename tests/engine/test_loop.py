"""Requests from submission to their end: what ends them, who shares a step, what is left behind."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxgen.engine.loop import GenerationLoop
from jaxgen.engine.outputs import FinishReason
from jaxgen.sampling import InvalidParameter, SamplingParams
from jaxgen.schedule.verdict import SchedulingError, SchedulingResult
from jaxgen_checkpoints.errors import RefusedInput

PROMPTS = ([5, 6, 7], [300, 1, 2, 9, 44, 17, 230], list(range(100, 120)), [404])


def greedy(**changes):
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **changes})


@pytest.fixture(scope="module")
def served(golden_dir, one_shape_llm):
    """An LLM, and what it says alone to each prompt: 24 tokens and their text."""
    llm = one_shape_llm(golden_dir("llama_tied"))
    alone = [llm.generate([prompt], greedy())[0].outputs[0] for prompt in PROMPTS]
    return SimpleNamespace(llm=llm, engine=llm.engine, alone=alone)


@pytest.fixture(autouse=True)
def nothing_stays(served):
    yield
    served.engine.state.check()
    assert served.engine.free_blocks == [40]
    assert (len(served.engine.state), served.engine.state.free_slots) == (0, 4)


def test_a_stop_string_may_span_tokens(served):
    whole = served.alone[0].text
    begun = served.llm.generate([PROMPTS[0]], greedy(max_tokens=9))[0].outputs[0].text
    stop = whole[len(begun) - 1 : len(begun) + 2]
    cut = whole.find(stop)
    ended = served.llm.generate([PROMPTS[0]], greedy(stop=["never", stop]))[0].outputs[0]
    assert (ended.text, ended.finish_reason, ended.stop_reason) == (whole[:cut], "stop", stop)
    assert len(ended.token_ids) < 24
    kept = greedy(stop=[stop], include_stop_str_in_output=True)
    assert served.llm.generate([PROMPTS[0]], kept)[0].outputs[0].text == whole[: cut + len(stop)]


def test_end_tokens_end_and_min_tokens_hold_them_back(served, generate):
    ids = served.alone[1].token_ids
    end = ids[3]
    at = ids.index(end) + 1
    by_eos, ignored, by_stop, held = generate(
        served.engine,
        [PROMPTS[1]] * 4,
        [
            greedy(ignore_eos=False),
            greedy(),
            greedy(stop_token_ids=[end]),
            greedy(stop_token_ids=[end], min_tokens=10),
        ],
        eos_ids=[end],
    )
    completion = by_eos.outputs[0]
    assert (completion.token_ids, completion.finish_reason) == (ids[:at], FinishReason.STOP)
    assert completion.stop_reason is None
    assert ignored.outputs[0].token_ids == ids
    assert ignored.outputs[0].finish_reason is FinishReason.LENGTH
    assert (by_stop.outputs[0].token_ids, by_stop.outputs[0].stop_reason) == (ids[:at], end)
    assert end not in held.outputs[0].token_ids[:10]
    assert len(held.outputs[0].token_ids) > 10


def test_without_max_tokens_the_context_is_filled(served):
    output = served.llm.generate([PROMPTS[2]], greedy(max_tokens=None))[0].outputs[0]
    assert len(output.token_ids) == 64 - len(PROMPTS[2])
    assert output.token_ids[:24] == served.alone[2].token_ids
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [True, False])
def test_many_requests_share_few_slots(served, generate, overlap):
    """Twenty requests on four slots, of lengths that end and begin in every step."""
    lengths = [1 + (7 * number) % 24 for number in range(20)]
    outputs = generate(
        served.engine,
        [PROMPTS[number % 4] for number in range(20)],
        [greedy(max_tokens=length) for length in lengths],
        overlap=overlap,
    )
    for number, output in enumerate(outputs):
        assert output.outputs[0].token_ids == served.alone[number % 4].token_ids[: lengths[number]]


def test_a_seed_gives_the_same_tokens_in_any_company(served, preempted, take_every_block):
    """Alone, among others, and preempted: penalties and the random stream go on where they were."""
    engine = served.engine
    asked = SamplingParams(
        temperature=1.3, top_p=0.9, seed=7, max_tokens=30, ignore_eos=True, frequency_penalty=0.5
    )
    alone = served.llm.generate([PROMPTS[1]], asked)[0].outputs[0].token_ids
    other = SamplingParams(temperature=1.3, top_p=0.9, seed=8, max_tokens=30, ignore_eos=True)
    assert served.llm.generate([PROMPTS[1]], other)[0].outputs[0].token_ids != alone

    loop = GenerationLoop(engine)
    params = [greedy(max_tokens=40), other, greedy(max_tokens=3), asked]
    outputs = [loop.submit(str(number), PROMPTS[1], chosen) for number, chosen in enumerate(params)]
    for _ in range(12):
        loop.step()
    hogs = take_every_block(engine)
    while loop.has_unfinished:
        loop.step()
        while preempted and hogs:
            engine.flush(hogs.pop())
    assert preempted  # the one that ranks last: `asked`
    assert outputs[3].outputs[0].token_ids == alone


def test_several_samples_are_as_many_seeds(served):
    asked = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
    many = served.llm.generate([PROMPTS[0]], SamplingParams(n=3, seed=40, **asked))[0]
    assert [output.index for output in many.outputs] == [0, 1, 2]
    for index, output in enumerate(many.outputs):
        single = served.llm.generate([PROMPTS[0]], SamplingParams(seed=40 + index, **asked))[0]
        assert single.outputs[0].token_ids == output.token_ids
    assert many.outputs[0].token_ids != many.outputs[1].token_ids


def test_prompt_logprobs_are_those_of_the_logits_however_the_prompt_was_cut(
    served, preempted, take_every_block
):
    """Chunks of 32 tokens beside others, computed anew after preemption, cached before."""
    engine, prompt = served.engine, [(7 * i) % 500 for i in range(45)]
    logits = [engine.put([1], [part], all_logits=True) for part in (prompt[:20], prompt[20:])]
    engine.flush(1)
    raw = np.concatenate(logits).astype(np.float64)
    raw -= np.log(np.exp(raw).sum(axis=1, keepdims=True))

    asked = SamplingParams(n=2, seed=1, prompt_logprobs=3, max_tokens=12, ignore_eos=True)
    loop = GenerationLoop(engine)
    outputs = [loop.submit("long", PROMPTS[1], greedy(max_tokens=40))]
    outputs += [loop.submit(name, prompt, asked) for name in ("a", "b")]
    assert outputs[1].awaits_prompt_logprobs
    loop.step()
    hogs = take_every_block(engine)
    while loop.has_unfinished:
        loop.step()
        while preempted and hogs:
            engine.flush(hogs.pop())
    assert preempted
    for output in outputs[1:]:
        first, *others = output.prompt_logprobs
        assert first is None
        assert [entry.token_id for entry in others] == prompt[1:]
        for place, entry in enumerate(others):
            expected = raw[place]
            np.testing.assert_allclose(entry.logprob, expected[entry.token_id], atol=1e-4)
            best = np.argsort(-expected, kind="stable")[:3]
            assert [token for token, _ in entry.top] == best.tolist()
    again = served.llm.generate([prompt], asked)[0]
    assert again.prompt_logprobs == outputs[1].prompt_logprobs
    assert served.llm.generate([[9]], greedy(prompt_logprobs=0))[0].prompt_logprobs == [None]


def test_a_stop_token_is_text_only_where_that_is_asked_for(served):
    whole = served.alone[0]
    end = whole.token_ids[2]
    for include in (False, True):
        params = greedy(stop_token_ids=[end], include_stop_str_in_output=include)
        ended = served.llm.generate([PROMPTS[0]], params)[0].outputs[0]
        kept = ended.token_ids if include else ended.token_ids[:-1]
        assert ended.text == "".join(map(served.llm.tokenizer.token_text, kept))


def test_abort_frees_at_once_and_disturbs_nobody(served):
    loop = GenerationLoop(served.engine)
    outputs = [loop.submit(str(i), prompt, greedy()) for i, prompt in enumerate(PROMPTS)]
    for _ in range(5):
        loop.step()
    held = served.engine.free_blocks
    loop.abort("2")
    loop.abort("unknown")
    assert served.engine.free_blocks > held
    ended = outputs[2].outputs[0]
    assert ended.finish_reason is FinishReason.ABORT
    said = len(ended.token_ids)
    again = loop.submit("2", PROMPTS[2], greedy())
    while loop.has_unfinished:
        loop.step()
    assert len(ended.token_ids) == said
    assert again.outputs[0].token_ids == served.alone[2].token_ids
    for number in (0, 1, 3):
        assert outputs[number].outputs[0].token_ids == served.alone[number].token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        (list(range(64)), greedy(), SchedulingError, "64 tokens, the context 64"),
        ([], greedy(), RefusedInput, "token ids"),
        ([512], greedy(), RefusedInput, "512"),
        ([1], greedy(logit_bias={600: 1.0}), InvalidParameter, "600"),
        (
            [1],
            greedy(allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2),
            InvalidParameter,
            "leaves nothing to sample",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_and_nobody_waits_for_it(
    served, prompt, params, error, words
):
    """Also where only admission would see it: a batch is queued whole or not at all."""
    with pytest.raises(error, match=words):
        served.llm.generate([PROMPTS[0], prompt], [greedy(), params])
    assert served.llm.generate([PROMPTS[0]], greedy())[0].outputs[0] == served.alone[0]


def test_more_blocks_than_there_are_is_refused_at_submission(golden_dir, one_shape):
    engine = one_shape(golden_dir("llama_tied"), num_gpu_blocks_override=5)
    loop = GenerationLoop(engine)
    with pytest.raises(SchedulingError) as caught:
        loop.submit("long", list(range(30)), greedy())
    assert caught.value.result is SchedulingResult.KVCacheLimitExceeded
    assert not loop.has_unfinished
    loop.submit("fits", list(range(17)), greedy())  # 40 tokens are computed, the 41st is not


def test_what_fills_the_context_fills_a_smaller_cache(golden_dir, one_shape, caplog):
    """Whoever does not say how long an answer may be is not refused for that."""
    engine = one_shape(golden_dir("llama_tied"), num_gpu_blocks_override=3, max_num_seqs=1)
    loop = GenerationLoop(engine)
    assert loop.max_context == 25  # the last token is never computed
    assert "holds a sequence of 25 tokens" in caplog.text
    output = loop.submit("a", [5] * 20, SamplingParams(max_tokens=None, ignore_eos=True))
    while loop.has_unfinished:
        loop.step()
    assert len(output.outputs[0].token_ids) == 5


def test_a_request_that_others_starve_says_so(served, take_every_block):
    loop = GenerationLoop(served.engine)
    hogs = take_every_block(served.engine)
    output = loop.submit("late", PROMPTS[0], greedy())
    with pytest.raises(SchedulingError, match=r"sequences of `put`") as caught:
        loop.step()
    assert caught.value.result is SchedulingResult.KVCacheLimitExceeded
    while hogs:
        served.engine.flush(hogs.pop())
    while loop.has_unfinished:
        loop.step()
    assert output.outputs[0].token_ids == served.alone[0].token_ids


def test_streams_grow_share_steps_and_may_be_left(served):
    first = served.llm.stream(PROMPTS[0], greedy())
    second = served.llm.stream(PROMPTS[1], greedy(max_tokens=3))
    left = served.llm.stream(PROMPTS[2], greedy())
    next(left)
    lengths = [len(next(stream).outputs[0].token_ids) for stream in (first, second, first)]
    left.close()
    *_, last = second
    assert last.outputs[0].token_ids == served.alone[1].token_ids[:3]
    lengths += [len(output.outputs[0].token_ids) for output in first]
    assert lengths[0] < lengths[2] < lengths[3]
    assert lengths[-1] == 24
    assert last.finished


def test_text_and_ids_and_their_params(served):
    llm = served.llm
    by_text = llm.generate("the cat", greedy())[0]
    assert by_text.prompt == "the cat"
    (by_ids,) = llm.generate(by_text.prompt_token_ids, greedy())
    assert by_ids.outputs == by_text.outputs
    assert llm.generate([], greedy()) == []
    with pytest.raises(RefusedInput, match="2 prompts were given 1 sampling params"):
        llm.generate(["a", "b"], [greedy()])


def test_whoever_may_be_answered_longest_begins_and_outputs_stay_in_order(served):
    several = [PROMPTS[index] for index in (0, 1, 2, 3, 0, 1)]  # four run at once
    lengths = (2, 3, 5, 24, 6, 24)
    outputs = served.llm.generate(several, [greedy(max_tokens=length) for length in lengths])
    for index, output in zip((0, 1, 2, 3, 0, 1), outputs, strict=True):
        said = output.outputs[0].token_ids
        assert said == served.alone[index].token_ids[: len(said)]
    assert tuple(len(output.outputs[0].token_ids) for output in outputs) == lengths
    assert [output.request_id for output in outputs] == sorted(
        (output.request_id for output in outputs), key=int
    )
    begun = [output.times.first_scheduled for output in outputs]
    assert max(begun[2:]) < min(begun[:2])
