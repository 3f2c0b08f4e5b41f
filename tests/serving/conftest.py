"""Servers to be asked: one around a tiny real model, others around an engine that only pretends."""

from collections.abc import Callable, Generator

import pytest
from starlette.testclient import TestClient

from jaxgen.llm import LLM
from jaxgen.serving.app import create_app
from jaxgen.serving.async_engine import AsyncEngine
from jaxgen.serving.settings import ServerSettings
from jaxgen.text import load_tokenizer
from tests.serving.live import Live, live
from tests.serving.stub_engine import StubEngine

SMALL = {
    "dtype": "float32",
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "max_model_len": 96,
    "block_size": 16,
}


@pytest.fixture(scope="session")
def tokenizer(golden_dir):
    return load_tokenizer(golden_dir("llama_plain"), vocab_size=512)


@pytest.fixture(scope="session")
def llama(golden_dir) -> LLM:
    """The model behind `served`; only its parts may be looked at, the server drives it."""
    return LLM(golden_dir("llama_plain"), **SMALL)


@pytest.fixture(scope="session")
def served(llama) -> Generator[Live]:
    """The tiny model, served on a free port."""
    engine = AsyncEngine.of(llama, name="llama")
    with live(create_app(engine, ServerSettings(served_model_names=("llama", "alias")))) as server:
        yield server


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
