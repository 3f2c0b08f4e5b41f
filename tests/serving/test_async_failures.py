"""Steps that fail, a device that always does, a thread that dies: who is concerned is told."""

import asyncio
import ctypes

import pytest

from jaxgen.engine.outputs import FinishReason
from jaxgen.engine.runner import StepFailed
from jaxgen.serving.async_engine import AsyncEngine, EngineDead
from jaxgen.serving.async_engine_thread import MOST_FAILURES
from tests.serving.small_engine import PROMPTS, collect, greedy, running


def test_a_failed_step_ends_its_requests_and_the_next_are_served(
    small_loop, small_llm, alone, monkeypatch
):
    fail = [True]
    read = small_llm.engine.runner.read

    def failing(results):
        if fail.pop() if fail else False:
            raise StepFailed("the device said no")
        return read(results)

    monkeypatch.setattr(small_llm.engine.runner, "read", failing)

    async def main():
        async with running(small_loop, small_llm) as engine:
            *_, last = await collect(engine, "unlucky", PROMPTS[0], greedy())
            assert last.completions[0].finish_reason is FinishReason.ERROR
            assert "said no" in last.completions[0].error
            ids, *_ = await collect(engine, "next", PROMPTS[0], greedy())
            assert ids == alone[0].token_ids
            assert engine.healthy

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_device_that_fails_at_every_read_is_given_up(small_loop, small_llm, monkeypatch):
    """Each of its steps can be sent; nobody may be told for ever that it is healthy."""

    def failing(results):
        raise StepFailed("the device said no")

    monkeypatch.setattr(small_llm.engine.runner, "read", failing)

    async def main():
        async with running(small_loop, small_llm) as engine:
            for number in range(MOST_FAILURES - 1):
                *_, last = await collect(engine, str(number), PROMPTS[0], greedy())
                assert last.completions[0].finish_reason is FinishReason.ERROR
                assert engine.healthy
            with pytest.raises(EngineDead, match="said no"):
                await collect(engine, "last", PROMPTS[0], greedy())
            assert not engine.healthy

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["killed", "broken"])
def test_when_the_thread_dies_everyone_is_told(small_loop, small_llm, monkeypatch, how):
    async def main():
        engine = AsyncEngine(small_loop, name="tiny", tokenizer=small_llm.tokenizer)
        await engine.start()
        asked = [collect(engine, str(i), PROMPTS[i], greedy(max_tokens=40)) for i in range(4)]
        jobs = [asyncio.create_task(job) for job in asked]
        while not engine.stats().running:
            await asyncio.sleep(0.001)
        if how == "killed":
            thread = engine._thread._thread
            kill = ctypes.pythonapi.PyThreadState_SetAsyncExc
            kill(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        else:
            monkeypatch.setattr(type(small_loop), "step", lambda loop: 1 / 0)
        told = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 30)
        assert all(isinstance(error, EngineDead) for error in told)
        assert not engine.healthy
        assert ("SystemExit" if how == "killed" else "ZeroDivisionError") in engine.error
        with pytest.raises(EngineDead):
            await collect(engine, "late", PROMPTS[0], greedy())
        with pytest.raises(EngineDead):
            await engine.abort(None)
        await engine.stop()

    asyncio.run(main())
    monkeypatch.undo()
    for name in [str(i) for i in range(4)]:
        small_loop.abort(name)
    small_loop._in_flight.clear()
