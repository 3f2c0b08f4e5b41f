"""Streams of an engine in a thread: same text under load, left early, read late, aborted."""

import asyncio
import contextlib
import random
import threading
import time

import pytest

from jaxgen.engine.outputs import FinishReason
from jaxgen.grammar.rules import RuleCompiler
from jaxgen.sampling import InvalidParameter, SamplingParams
from jaxgen.schedule.verdict import SchedulingError
from jaxgen_checkpoints.errors import RefusedInput
from tests.serving.small_engine import PROMPTS, collect, greedy, running


def test_under_load_with_preemption_and_aborts_all_get_what_they_get_alone(
    small_loop, small_llm, alone
):
    """Thirty requests on four slots and ten blocks; every third reader leaves at some point."""
    dice = random.Random(1)

    async def leave(engine, name, number, after):
        async with contextlib.aclosing(
            engine.generate(name, PROMPTS[number], greedy(max_tokens=30))
        ) as deltas:
            async for delta in deltas:
                after -= sum(len(completion.token_ids) for completion in delta.completions)
                if after <= 0:
                    break

    async def main():
        async with running(small_loop, small_llm) as engine:
            jobs = []
            for number in range(30):
                which = number % 4
                if number % 3 == 2:
                    jobs.append(leave(engine, str(number), which, dice.randrange(20)))
                else:
                    length = dice.randint(1, 24)
                    jobs.append(
                        collect(engine, str(number), PROMPTS[which], greedy(max_tokens=length))
                    )
            told = await asyncio.gather(*jobs)
            for number, answer in enumerate(told):
                if answer is not None:
                    ids, text, last = answer
                    assert ids == alone[number % 4].token_ids[: len(ids)]
                    assert alone[number % 4].text.startswith(text.rstrip("\ufffd"))
                    assert last.completions[-1].finish_reason is FinishReason.LENGTH
            full = await collect(engine, "full", PROMPTS[2], greedy())
            assert full[:2] == (alone[2].token_ids, alone[2].text)
            return engine.stats()

    stats = asyncio.run(main())
    assert stats.preemptions > 0
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.kv_total_blocks == 10
    assert stats.steps > 20
    assert stats.generation_tokens > 200


def test_deltas_add_up_and_listeners_are_told(small_loop, small_llm, alone):
    async def main():
        records = []
        async with running(small_loop, small_llm) as engine:
            engine.add_listener(records.append)
            deltas = [
                delta
                async for delta in engine.generate(
                    "two",
                    PROMPTS[1],
                    SamplingParams(n=2, seed=3, max_tokens=9, ignore_eos=True, logprobs=2),
                )
            ]
            assert engine.tokenizer is small_llm.tokenizer
            assert engine.max_context == 64
        return deltas, records

    deltas, (record,) = asyncio.run(main())
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[0].prompt_token_ids == PROMPTS[1]
    assert not any(delta.prompt_token_ids for delta in deltas[1:])
    whole = small_llm.generate(
        [PROMPTS[1]], SamplingParams(n=2, seed=3, max_tokens=9, ignore_eos=True)
    )
    for index, expected in enumerate(whole[0].outputs):
        mine = [c for delta in deltas for c in delta.completions if c.index == index]
        assert "".join(completion.text for completion in mine) == expected.text
        assert [token for c in mine for token in c.token_ids] == expected.token_ids
        logprobs = [entry for completion in mine for entry in completion.logprobs]
        assert [entry.token_id for entry in logprobs] == expected.token_ids
        assert all(len(entry.top) == 2 for entry in logprobs)
        assert [c.finish_reason for c in mine if c.finish_reason] == [FinishReason.LENGTH]
    assert (record.request_id, record.n, record.max_tokens) == ("two", 2, 9)
    assert (record.prompt_tokens, record.generated_tokens) == (7, 18)
    assert record.finish_reasons == (FinishReason.LENGTH, FinishReason.LENGTH)
    times = (record.arrival, record.first_scheduled, record.first_token, record.finished)
    assert list(times) == sorted(times)


def test_a_slow_reader_gets_few_deltas_and_holds_up_nobody(small_loop, small_llm, alone):
    async def main():
        async with running(small_loop, small_llm) as engine:
            gate = asyncio.Event()
            seen = []

            async def slow():
                async for delta in engine.generate("slow", PROMPTS[0], greedy()):
                    seen.append(delta)
                    await gate.wait()

            reader = asyncio.create_task(slow())
            quick = await collect(engine, "quick", PROMPTS[1], greedy())
            while engine.stats().running:
                await asyncio.sleep(0.01)
            gate.set()
            await reader
            return seen, quick

    seen, quick = asyncio.run(main())
    assert quick[0] == alone[1].token_ids
    assert len(seen) <= 2
    assert [t for delta in seen for c in delta.completions for t in c.token_ids] == (
        alone[0].token_ids
    )


def test_what_is_refused_is_told_before_anything_is_queued(small_loop, small_llm):
    async def main():
        async with running(small_loop, small_llm) as engine:
            for prompt, params, error in (
                ([], greedy(), RefusedInput),
                ([600], greedy(), RefusedInput),
                (list(range(64)), greedy(), SchedulingError),
                ([1], greedy(structured_outputs={"regex": "(a"}), InvalidParameter),
                ([1], greedy(structured_outputs={"json": '{"type": "what"}'}), InvalidParameter),
            ):
                with pytest.raises(error):
                    await collect(engine, "bad", prompt, params)
            first = asyncio.create_task(collect(engine, "same", PROMPTS[0], greedy()))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="same is in the engine already"):
                await collect(engine, "same", PROMPTS[0], greedy())
            await first
            assert engine.healthy

    asyncio.run(main())


def test_aborts_pauses_and_draining(small_loop, small_llm, alone):
    async def main():
        async with running(small_loop, small_llm, drain_seconds=60) as engine:
            await engine.pause()
            jobs = [
                asyncio.create_task(collect(engine, str(i), PROMPTS[i], greedy())) for i in range(3)
            ]
            await asyncio.sleep(0.1)
            assert engine.stats().generation_tokens == before
            await engine.abort("1")
            await engine.abort("unknown")
            await engine.resume()
            aborted = await jobs[1]
            assert aborted[0] == []
            assert aborted[2].completions[0].finish_reason is FinishReason.ABORT
            later = asyncio.create_task(collect(engine, "later", PROMPTS[3], greedy()))
            await asyncio.sleep(0)
        return [await jobs[0], await jobs[2], await later]

    before = small_loop.counters.generation_tokens
    told = asyncio.run(main())
    assert [ids for ids, *_ in told] == [alone[i].token_ids for i in (0, 2, 3)]


@pytest.mark.parametrize(
    "masked",
    [{"bad_words": ["a", "b c"]}, {"structured_outputs": {"json": {"type": "integer"}}}],
)
def test_what_a_request_may_say_is_compiled_once_and_beside_the_engine(
    small_loop, small_llm, monkeypatch, masked
):
    """For whatever takes its time in the engine's thread, everybody waits."""
    compiled, real = [], RuleCompiler.compile

    def watched(rules, params):
        compiled.append(threading.current_thread().name)
        return real(rules, params)

    monkeypatch.setattr(RuleCompiler, "compile", watched)
    params = SamplingParams(n=3, temperature=1.0, max_tokens=4, **masked)

    async def main():
        async with running(small_loop, small_llm) as engine:
            return [delta async for delta in engine.generate("some", PROMPTS[0], params)]

    told = asyncio.run(main())
    assert {each.index for delta in told for each in delta.completions} == {0, 1, 2}
    (thread,) = compiled
    assert thread != "jaxgen-engine"


def test_an_idle_thread_sleeps(small_loop, small_llm):
    async def main():
        async with running(small_loop, small_llm):
            before = time.process_time()
            await asyncio.sleep(0.5)
            return time.process_time() - before

    assert asyncio.run(main()) < 0.1
