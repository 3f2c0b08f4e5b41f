"""The server moves 20,000 tokens a second on one core, when the engine costs nothing."""

import pytest

from tests.serving.overhead import measure


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False], ids=["each token alone", "backlog shares"])
def test_tokens_a_second(wait):
    told = measure(wait=wait)
    assert told["tokens_per_cpu_second"] > 20_000
    if not wait:
        assert told["chunks_per_token"] < 1
