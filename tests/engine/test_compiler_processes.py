"""Forwards that other processes lowered are the forwards; what those cannot do is done here."""

import logging
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxgen.engine import lowering_pool
from jaxgen.engine.build import describe, load_model
from jaxgen.engine.lowering_order import Order, Request
from jaxgen.engine.lowering_pool import LoweringFailed, LoweringPool, useful_processes
from jaxgen.engine.programs import Draw, Forward, Sizes
from jaxgen.ragged.buckets import Bucket
from jaxgen.sampling import Demand
from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_models.llama.policy import LlamaPolicy
from pallas_kernels.dispatch import using


@pytest.fixture
def started(one_shape):
    """An engine with the two programs that it has, the forward lowered in a process of its own."""

    def start(folder, **options):
        engine = one_shape(folder, max_num_seqs=2, max_num_batched_tokens=16, **options)
        (bucket,) = engine.buckets.mixed
        engine.runner.warm_up([Forward(bucket), Draw(bucket.rows, Demand.ANY)], processes=1)
        return engine

    return start


@pytest.fixture
def short_lived(monkeypatch):
    """Processes that end as soon as they are started."""

    def start():
        command = [sys.executable, "-c", ""]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(lowering_pool, "start_process", start)


def buffers(engine):
    """Where on the devices the cache lies."""
    leaves = jax.tree.leaves(engine.runner.pages)
    shards = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
    return [shard.unsafe_buffer_pointer() for shard in shards]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_tied", {"tensor_parallel_size": 2}),
        *(
            pytest.param(name, {}, marks=pytest.mark.slow)
            for name in ("llama_plain", "deepseek_v2_lite", "qwen3_moe", "gpt_oss_mxfp4")
        ),
        pytest.param(
            "qwen3_moe",
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_they_say_the_same(golden, tokens, started, caplog, name, options):
    caplog.set_level(logging.WARNING, "jaxgen.engine.programs")
    case = golden(name)
    engine = started(case.folder, **options)
    places = buffers(engine)
    assert tokens(engine, case.prompts) == case.greedy
    assert buffers(engine) == places  # the cache is written where it lies
    assert engine.runner.late_compiles == 0
    assert not caplog.records


def test_processes_that_fail_are_done_without(golden, tokens, started, short_lived, caplog):
    caplog.set_level(logging.WARNING, "jaxgen.engine.programs")
    case = golden("llama_tied")
    engine = started(case.folder)
    assert tokens(engine, case.prompts[:1]) == case.greedy[:1]
    assert [record.message[:24] for record in caplog.records] == ["lowering in this process"]


@pytest.fixture(scope="module")
def model(golden_dir):
    return load_model(describe(open_checkpoint(golden_dir("llama_tied"))), "float32").model


def request(rows):
    bucket = Bucket(16, rows, 4, decode=False)
    return Request(Forward(bucket), Sizes((8,), 8, rows))


def test_a_process_that_dies_costs_one_program(model):
    with LoweringPool(model, 1) as pool:
        first = pool.submit(request(1))
        while not (processes := list(pool.processes)):
            time.sleep(0.01)
        processes[0].kill()
        with pytest.raises(LoweringFailed):
            first.result()
        assert pool.submit(request(2)).result().data
        assert len(pool.processes) == 2


def test_an_interrupt_ends_them(model):
    pool = LoweringPool(model, 2)

    def interrupted():
        with pool:
            asked.extend(pool.submit(request(rows)) for rows in (1, 2, 3))
            raise KeyboardInterrupt

    asked = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(future.done() for future in asked)
    assert all(process.returncode is not None for process in pool.processes)


def test_none_outlives_the_process_that_asks(model, capfd):
    """Its ends of the pipes close, however it ended."""
    process = lowering_pool.start_process()
    process.stdin.write(pickle.dumps(Order.of(model)) + pickle.dumps(request(1)))
    process.stdin.close()
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGPIPE
    assert not capfd.readouterr().err


def test_where_they_are_of_use(model):
    def on(platform, model=model):
        devices = np.array([SimpleNamespace(platform=platform)])
        return replace(model, layout=SimpleNamespace(mesh=SimpleNamespace(devices=devices)))

    class Stranger(LlamaPolicy):
        """Of the user's own script."""

    assert useful_processes(on("cpu"), 24) == 0
    assert useful_processes(on("gpu"), 3) == 0
    assert useful_processes(on("gpu"), 24) <= 16
    assert useful_processes(replace(on("gpu"), policy=Stranger(model.config)), 24) == 0
    with using(ragged_attention="reference"):
        assert useful_processes(on("gpu"), 24) == 0


def test_processes_started_early_are_the_pools_or_nobodys(model, monkeypatch):
    monkeypatch.setattr(lowering_pool.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(lowering_pool, "_cores", lambda: 3)
    lowering_pool.start_early()
    early = list(lowering_pool._early)
    assert len(early) == 2
    lowering_pool.start_early()
    assert lowering_pool._early == early  # once
    with LoweringPool(model, 1) as pool:
        assert pool.submit(request(1)).result().data
        assert pool.processes[0] in early
    lowering_pool.end_early()
    assert all(process.poll() is not None for process in early)
