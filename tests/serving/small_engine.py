"""An engine in a thread, around a tiny model whose few blocks make requests preempt one another."""

import contextlib

from jaxgen.sampling import SamplingParams
from jaxgen.serving.async_engine import AsyncEngine

PROMPTS = ([5, 6, 7], [300, 1, 2, 9, 44, 17, 230], list(range(100, 120)), [404])


def greedy(**changes):
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **changes})


@contextlib.asynccontextmanager
async def running(loop, llm, **stop):
    engine = AsyncEngine(loop, name="tiny", tokenizer=llm.tokenizer)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop(**stop)


async def collect(engine, name, prompt, params, read=None):
    """(token ids, text, last delta) of a request with one continuation."""
    ids, text, delta = [], "", None
    async for delta in engine.generate(name, prompt, params):
        for completion in delta.completions:
            ids += completion.token_ids
            text += completion.text
        if read is not None:
            await read()
    return ids, text, delta
