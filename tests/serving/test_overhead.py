"""Server, and engine and server together, move 20,000 tokens a second on one core."""

import pytest

from tests.serving.overhead import SCENES, measure


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_tokens_a_second(scene):
    told = measure(scene)
    assert told["tokens_per_cpu_second"] > 20_000
    if scene in {"shared", "whole"}:
        assert told["chunks_per_token"] < 1
