"""Programs that other processes lowered are the programs; what those cannot do is done here."""

import logging

import pytest

from jaxgen.engine.programs import Draw, Forward
from jaxgen.sampling import Demand


@pytest.fixture
def started(one_shape):
    """An engine with the two programs that it has, the forward lowered in a process of its own."""

    def start(folder, **options):
        engine = one_shape(folder, max_num_seqs=2, max_num_batched_tokens=16, **options)
        (bucket,) = engine.buckets.mixed
        engine.runner.warm_up([Forward(bucket), Draw(bucket.rows, Demand.ANY)], processes=1)
        return engine

    return start


@pytest.mark.parametrize(
    ("name", "shards"),
    [("llama_tied", 2), ("deepseek_v2_lite", 1), ("qwen3_moe", 1), ("gpt_oss_mxfp4", 1)],
)
def test_they_say_the_same(golden, tokens, started, caplog, name, shards):
    caplog.set_level(logging.WARNING, "jaxgen.engine.programs")
    case = golden(name)
    engine = started(case.folder, tensor_parallel_size=shards)
    assert tokens(engine, case.prompts) == case.greedy
    assert engine.runner.late_compiles == 0
    assert not caplog.records
