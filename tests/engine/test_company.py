"""What a request is told does not depend on its company, nor on how far the host runs ahead."""

import json
import shutil

import numpy as np
import pytest

from jaxgen.engine.loop import GenerationLoop
from jaxgen.engine.outputs import FinishReason
from jaxgen.sampling import SamplingParams
from jaxgen_checkpoints.errors import RefusedInput

PROMPT = [300, 1, 2, 9, 44, 17, 230, 2]
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6}
NEW = 24


@pytest.fixture(scope="module")
def llm(golden_dir, one_shape_llm):
    return one_shape_llm(golden_dir("llama_tied"))


def mates(count=3):
    """Requests of every other kind: no seed, another seed, no penalty, greedy."""
    kinds = (
        {"temperature": 1.5},
        {"temperature": 1.1, "top_k": 3, "seed": 4},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    )
    return [SamplingParams(max_tokens=NEW + 9, ignore_eos=True, **kind) for kind in kinds[:count]]


def served_with(llm, params, others, *, overlap=True, hog=None, preempted=()):
    """The request's output, begun two steps after the others, with or without preemption."""
    loop = GenerationLoop(llm.engine, overlap=overlap)
    for number, each in enumerate(others):
        loop.submit(f"other {number}", [7 + number] * 5, each)
    loop.step()
    loop.step()
    output = loop.submit("mine", PROMPT, params)
    hogs = []
    for count in range(10_000):
        if not loop.has_unfinished:
            break
        loop.step()
        if hog is not None and count == 6:
            hogs = hog(llm.engine)
        while preempted and hogs:
            llm.engine.flush(hogs.pop())
    llm.engine.state.check()
    assert len(llm.engine.state) == 0
    return output


def by_hand(llm, penalties):
    """Greedy tokens from `put`'s logits, with the penalties as vLLM's documents define them."""
    said, fed = [], PROMPT
    for _ in range(NEW):
        (row,) = llm.engine.put([1], [fed])
        logits = np.asarray(row, np.float64)
        for token in {*PROMPT, *said}:
            factor = penalties["repetition_penalty"]
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(said):
            logits[token] -= penalties["presence_penalty"]
            logits[token] -= penalties["frequency_penalty"] * said.count(token)
        fed = [int(logits.argmax())]
        said += fed
    llm.engine.flush(1)
    return said


def test_penalties_count_what_was_said_and_no_more(llm, preempted, take_every_block):
    """The host is a step ahead: the last token is known to the device alone when it counts."""
    expected = by_hand(llm, PENALTIES)
    plain = by_hand(llm, {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0})
    assert expected != plain
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, **PENALTIES)
    for overlap in (True, False):
        for others in ([], mates()):
            output = served_with(llm, params, others, overlap=overlap)
            assert output.outputs[0].token_ids == expected
    assert not preempted
    output = served_with(llm, params, mates(), hog=take_every_block, preempted=preempted)
    assert preempted
    assert output.outputs[0].token_ids == expected


def test_who_has_no_seed_takes_nothing_from_who_has(llm, preempted, take_every_block):
    params = SamplingParams(temperature=1.2, seed=11, max_tokens=NEW, ignore_eos=True, logprobs=3)
    alone = served_with(llm, params, []).outputs[0]
    for others in (mates(1), mates(1) * 3, mates()):
        assert served_with(llm, params, others).outputs[0] == alone
    again = served_with(llm, params, mates(1) * 3, hog=take_every_block, preempted=preempted)
    assert preempted
    assert again.outputs[0].token_ids == alone.token_ids
    np.testing.assert_allclose(
        [entry.logprob for entry in again.outputs[0].logprobs],
        [entry.logprob for entry in alone.logprobs],
        atol=1e-4,
    )
    free = SamplingParams(temperature=1.2, max_tokens=NEW, ignore_eos=True)
    drawn = {tuple(output.outputs[0].token_ids) for output in llm.generate([PROMPT] * 3, free)}
    assert len(drawn) == 3


def test_every_end_token_of_the_generation_config_ends(golden_dir, one_shape_llm, tmp_path, llm):
    """config.json names one, generation_config.json names two more; `ignore_eos` is of all."""
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    ids = llm.generate([PROMPT], greedy)[0].outputs[0].token_ids
    first = next(place for place in range(3, NEW) if ids.index(ids[place]) == place)
    folder = shutil.copytree(golden_dir("llama_tied"), tmp_path / "model")
    named = {"eos_token_id": [511, ids[first]], "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(named))
    ending = one_shape_llm(folder)
    assert set(ending.eos_ids) >= {511, ids[first], *llm.eos_ids}
    ended = ending.generate([PROMPT], SamplingParams(temperature=0, max_tokens=NEW))[0].outputs[0]
    assert ended.token_ids == ids[: first + 1]
    assert (ended.finish_reason, ended.stop_reason) == (FinishReason.STOP, None)
    later = SamplingParams(temperature=0, max_tokens=NEW, min_tokens=first + 4)
    assert ids[first] not in ending.generate([PROMPT], later)[0].outputs[0].token_ids[: first + 3]
    assert ending.generate([PROMPT], greedy)[0].outputs[0].token_ids == ids


class Interrupting:
    """A tokenizer at whose work Ctrl-C is pressed."""

    def encode(self, text):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("unfit", "error"), [([3, 512], RefusedInput), ("text", KeyboardInterrupt)], ids=["ids", "key"]
)
def test_who_cannot_be_queued_leaves_none_of_the_batch_behind(llm, monkeypatch, unfit, error):
    monkeypatch.setattr(llm, "need_tokenizer", Interrupting)
    lengths = [SamplingParams(max_tokens=length) for length in (3, 9, NEW)]
    with pytest.raises(error):
        llm.generate([PROMPT, unfit, PROMPT[:3]], lengths)
    llm.generate([PROMPT], SamplingParams(max_tokens=1))
    assert len(llm.engine.state) == 0
