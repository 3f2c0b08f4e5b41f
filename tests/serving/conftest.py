"""Servers to be asked: one around a tiny real model, others around an engine that only pretends."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from jaxgen.llm import LLM
from jaxgen.ragged.buckets import Buckets
from jaxgen.serving.app import create_app
from jaxgen.serving.async_engine import AsyncEngine
from jaxgen.serving.settings import ServerSettings
from jaxgen.text import load_tokenizer
from tests.serving.live import Live, live
from tests.serving.small_engine import PROMPTS, greedy
from tests.serving.stub_engine import StubEngine

SMALL = {
    "dtype": "float32",
    "max_num_batched_tokens": 16,
    "max_num_seqs": 1,
    "max_model_len": 96,
    "block_size": 16,
}


@pytest.fixture(scope="session")
def tokenizer(golden_dir):
    return load_tokenizer(golden_dir("llama_plain"), vocab_size=512)


@contextmanager
def serving_llama(folder: Path, **options) -> Generator[Live]:
    """The tiny model on a free port; options: of the engine, where they are not SMALL's."""
    engine = AsyncEngine.of(LLM(folder, **(SMALL | options)), name="llama")
    with live(create_app(engine, ServerSettings(served_model_names=("llama", "alias")))) as server:
        yield server


@pytest.fixture(scope="session")
def served(golden_dir) -> Generator[Live]:
    """The tiny model, one sequence at a time: few shapes are to be compiled."""
    with serving_llama(golden_dir("llama_plain")) as server:
        yield server


@pytest.fixture
def crowded(golden_dir) -> Generator[Live]:
    """The tiny model with several sequences in a step, and a KV cache that is too small for all."""
    with serving_llama(golden_dir("llama_plain"), max_num_seqs=4, num_gpu_blocks_override=12) as it:
        yield it


@pytest.fixture
def mortal(golden_dir) -> Generator[Live]:
    """The tiny model, for a test that kills its engine."""
    with serving_llama(golden_dir("llama_plain")) as server:
        yield server


@pytest.fixture(scope="session")
def small_llm(golden_dir):
    """One shape of step; ten blocks, so that four requests of 44 tokens preempt one another."""
    llm = LLM(
        golden_dir("llama_tied"),
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=8,
        max_model_len=64,
        num_gpu_blocks_override=10,
    )
    shape = llm.engine.buckets.mixed[-1]
    llm.engine.buckets = Buckets((shape,), (shape,))
    return llm


@pytest.fixture(scope="session")
def alone(small_llm):
    """What each prompt is answered when it is alone."""
    return [small_llm.generate([prompt], greedy())[0].outputs[0] for prompt in PROMPTS]


@pytest.fixture
def small_loop(small_llm, alone):
    """The engine's loop, as a server takes it over; nothing may be left in it."""
    del alone
    yield small_llm._loop
    state = small_llm.engine.state
    state.check()
    assert (len(state), state.free_slots, state.free_blocks) == (0, 4, (10,))


type Asker = Callable[..., TestClient]


@pytest.fixture
def ask(tokenizer) -> Generator[Asker]:
    """`ask(texts, seconds=..., **settings)` is a client of a server whose answers are `texts`.

    Its engine is `client.app.state.serving.engine`.
    """
    clients = []

    def begin(texts=("one", " two", " three"), *, seconds=0.0, **settings) -> TestClient:
        engine = StubEngine(tokenizer, texts, seconds=seconds)
        client = TestClient(create_app(engine, ServerSettings(**settings)))
        client.__enter__()
        clients.append(client)
        while client.get("/ready").status_code != 200:
            pass
        return client

    yield begin
    for client in clients:
        client.__exit__(None, None, None)
