"""A real server around a tiny model, for load generators."""

from collections.abc import Generator

import pytest

from jaxgen.llm import LLM
from jaxgen.serving.app import create_app
from jaxgen.serving.async_engine import AsyncEngine
from jaxgen.serving.settings import ServerSettings
from tests.serving.live import Live, live

LIMITS = {"dtype": "float32", "max_num_batched_tokens": 16, "max_num_seqs": 1, "block_size": 16}


@pytest.fixture(scope="session")
def server(golden_dir) -> Generator[Live]:
    """Serves as `tiny`, to those who know the key."""
    engine = AsyncEngine.of(LLM(golden_dir("llama_plain"), max_model_len=96, **LIMITS), name="tiny")
    settings = ServerSettings(served_model_names=("tiny",), api_keys=("key",), access_log=False)
    with live(create_app(engine, settings)) as server:
        yield server
