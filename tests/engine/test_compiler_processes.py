"""Programs that other processes compiled are the programs; what those cannot do is done here."""

import logging
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxgen.engine import compiler_pool, programs
from jaxgen.engine.build import describe, load_model
from jaxgen.engine.compiler_order import Order, Request
from jaxgen.engine.compiler_pool import CompilerFailed, CompilerPool, useful_processes
from jaxgen.engine.program_store import ProgramStore
from jaxgen.engine.programs import Abandoned, Draw, Forward, Programs, Sizes
from jaxgen.ragged.buckets import Bucket
from jaxgen.sampling import Demand
from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_models.llama.policy import LlamaPolicy
from pallas_kernels.dispatch import using


@pytest.fixture
def started(one_shape):
    """An engine with the two programs that it has, compiled in a process of their own."""

    def start(folder, **options):
        engine = one_shape(folder, max_num_seqs=2, max_num_batched_tokens=16, **options)
        (bucket,) = engine.buckets.mixed
        with CompilerPool(engine.model, 1) as pool:
            engine.runner.warm_up([Forward(bucket), Draw(bucket.rows, Demand.ANY)], pool)
        return engine

    return start


@pytest.fixture
def nothing_kept(monkeypatch):
    """No program is on disk."""
    monkeypatch.setattr(ProgramStore, "serves", lambda _: False)


@pytest.fixture
def short_lived(monkeypatch):
    """Processes that end as soon as they are started."""

    def start():
        command = [sys.executable, "-c", ""]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(compiler_pool, "start_process", start)


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


@pytest.mark.newest
@pytest.mark.usefixtures("nothing_kept", "short_lived")
def test_processes_that_fail_are_done_without(golden, tokens, started, caplog):
    caplog.set_level(logging.WARNING, "jaxgen.engine.programs")
    case = golden("llama_tied")
    engine = started(case.folder)
    assert tokens(engine, case.prompts[:1]) == case.greedy[:1]
    said = {record.message[:25] for record in caplog.records}
    assert said == {"compiling in this process"}
    assert len(caplog.records) == 2


@pytest.fixture(scope="module")
def model(golden_dir):
    return load_model(describe(open_checkpoint(golden_dir("llama_tied"))), "float32").model


def request(rows):
    bucket = Bucket(16, rows, 4, decode=False)
    return Request(Forward(bucket), Sizes((8,), 8, rows))


def test_a_process_that_dies_costs_one_program(model):
    with CompilerPool(model, 1) as pool:
        first = pool.submit(request(1))
        while not (processes := list(pool.processes)):
            time.sleep(0.01)
        processes[0].kill()
        with pytest.raises(CompilerFailed):
            first.result()
        assert pool.submit(request(2)).result().data
        assert len(pool.processes) == 2


@pytest.mark.newest
def test_an_interrupt_ends_them(model):
    pool = CompilerPool(model, 2)

    def interrupted():
        with pool:
            asked.extend(pool.submit(request(rows)) for rows in (1, 2, 3))
            raise KeyboardInterrupt

    asked = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(future.done() for future in asked)
    assert all(process.returncode is not None for process in pool.processes)


@pytest.mark.newest
def test_none_outlives_the_process_that_asks(model, capfd):
    """Its ends of the pipes close, however it ended."""
    process = compiler_pool.start_process()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(pickle.dumps(Order.of(model)) + pickle.dumps(request(1)))
    process.stdin.close()
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGPIPE
    assert not capfd.readouterr().err


@pytest.mark.newest
def test_none_outlives_a_process_that_is_killed():
    """Not even one whose pipes somebody else holds open, or that is in the middle of a program."""
    starts = "; ".join(
        (
            "import subprocess, sys, os",
            "command = [sys.executable, '-m', 'jaxgen.engine.compiler_worker', str(os.getpid())]",
            "process = subprocess.Popen(command)",
            "print('started', flush=True)",
            "process.wait()",
        )
    )
    command = [sys.executable, "-c", starts]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == b"started\n"
        asking.kill()
        ended = threading.Thread(target=asking.stdout.read)  # until nobody can write any more
        ended.start()
        ended.join(60)
        assert not ended.is_alive()


@pytest.mark.newest
def test_where_they_are_of_use(model, monkeypatch):
    def on(platform, model=model):
        devices = np.array([SimpleNamespace(platform=platform)])
        return replace(model, layout=SimpleNamespace(mesh=SimpleNamespace(devices=devices)))

    class Stranger(LlamaPolicy):
        """Of the user's own script."""

    monkeypatch.setattr(compiler_pool, "_cores", lambda: 32)
    monkeypatch.setattr(compiler_pool, "host_bytes_left", lambda: 10**12)
    assert useful_processes(on("cpu"), 24) == 0
    assert useful_processes(on("gpu"), 3) == 0
    assert useful_processes(on("gpu"), 9) == 9
    assert useful_processes(on("gpu"), 24) == 16
    assert useful_processes(replace(on("gpu"), policy=Stranger(model.config)), 24) == 0
    with using(ragged_attention="reference"):
        assert useful_processes(on("gpu"), 24) == 0
    monkeypatch.setattr(compiler_pool, "host_bytes_left", lambda: 16 * 10**9)
    assert useful_processes(on("gpu"), 24) == 6
    monkeypatch.setattr(compiler_pool, "_cores", lambda: 2)
    assert useful_processes(on("gpu"), 24) == 0


def test_devices_that_do_not_describe_themselves_have_none(model, monkeypatch, caplog):
    def silent(_):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no topology")

    monkeypatch.setattr(compiler_pool, "useful_processes", lambda *_: 2)
    monkeypatch.setattr(compiler_pool.Order, "of", silent)
    assert compiler_pool.useful_pool(model, 24) is None
    assert "UNIMPLEMENTED" in caplog.text


@pytest.mark.newest
@pytest.mark.usefixtures("nothing_kept")
def test_a_program_that_cannot_be_loaded_is_made_here(golden, tokens, started, monkeypatch, caplog):
    """Another build of the runtime, say."""
    caplog.set_level(logging.WARNING, "jaxgen.engine.programs")
    load, refused = programs.unpack, []

    def refuse_once(data, devices):
        if not refused:
            refused.append(data)
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: written by another version")
        return load(data, devices)

    monkeypatch.setattr(programs, "unpack", refuse_once)
    case = golden("llama_tied")
    assert tokens(started(case.folder), case.prompts[:1]) == case.greedy[:1]
    assert "written by another version" in caplog.text


def test_closing_the_pool_gives_up_what_it_has_not_made(model):
    pool = CompilerPool(model, 1)
    wanted = request(1), request(2)
    made = Programs(model, wanted[0].sizes)

    def close_soon():
        while not pool.processes:
            time.sleep(0.01)
        pool.close()

    threading.Thread(target=close_soon).start()
    for _ in ("closed meanwhile", "closed before"):
        with pytest.raises(Abandoned):
            made.compile_all([each.key for each in wanted], pool)
    assert len(made) == 0
