"""What one start compiled the next one reads; what does not fit it is compiled anew."""

import json
import logging

import jax
import pytest

from jaxgen.engine.programs import Draw, Forward
from jaxgen.sampling import Demand
from pallas_kernels.dispatch import using


@pytest.fixture
def cache(tmp_path):
    """JAX's own cache in a folder, as the commands turn it on."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def started(one_shape):
    """An engine with all its programs, of which there are two."""

    def start(folder, **options):
        engine = one_shape(folder, max_num_seqs=2, max_num_batched_tokens=16, **options)
        (bucket,) = engine.buckets.mixed
        engine.runner.warm_up([Forward(bucket), Draw(bucket.rows, Demand.ANY)])
        return engine

    return start


def programs(records):
    return [record.message for record in records if "programs compiled" in record.message]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_second_start_compiles_no_step_and_says_the_same(
    golden, tokens, started, cache, caplog, shards
):
    caplog.set_level(logging.INFO, "jaxgen.engine.programs")
    case = golden("llama_tied")
    for _ in range(2):
        engine = started(case.folder, tensor_parallel_size=shards)
        assert tokens(engine, case.prompts) == case.greedy
        assert engine.runner.late_compiles == 0
    first, second = programs(caplog.records)
    assert first.startswith("2 programs compiled and 0 read")
    assert second.startswith("0 programs compiled and 2 read")
    assert len(list(cache.iterdir())) == 2


def test_what_jax_has_cached_already_is_kept_whole(golden, tokens, one_shape, started, cache):
    """XLA's CPU programs that come out of JAX's cache lose their functions when written again."""
    case = golden("llama_tied")
    without_a_warm_up = one_shape(case.folder, max_num_seqs=2, max_num_batched_tokens=16)
    assert tokens(without_a_warm_up, case.prompts) == case.greedy
    for _ in range(2):
        assert tokens(started(case.folder), case.prompts) == case.greedy
    assert len(list(cache.iterdir())) == 2


def test_a_spoilt_file_is_replaced(golden_dir, started, cache, caplog):
    """Cut short, or with one bit of the program changed."""
    caplog.set_level(logging.INFO, "jaxgen.engine.programs")
    started(golden_dir("llama_tied"))
    cut, changed = cache.iterdir()
    cut.write_bytes(cut.read_bytes()[:100])
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    started(golden_dir("llama_tied"))
    started(golden_dir("llama_tied"))
    assert [text[:30] for text in programs(caplog.records)] == [
        "2 programs compiled and 0 read",
        "2 programs compiled and 0 read",
        "0 programs compiled and 2 read",
    ]


def test_a_folder_that_cannot_be_made_costs_nothing_but_time(
    golden, tokens, started, cache, caplog
):
    cache.write_text("no folder")
    case = golden("llama_tied")
    assert tokens(started(case.folder), case.prompts) == case.greedy
    assert "cannot be written" in caplog.text


def test_other_sizes_and_models_are_other_programs(
    golden_dir, started, cache, caplog, tmp_path_factory
):
    """A model whose arrays have the same shapes, but whose heads turn faster, among them."""
    caplog.set_level(logging.INFO, "jaxgen.engine.programs")
    first, second = golden_dir("llama_tied"), tmp_path_factory.mktemp("model")
    for file in first.iterdir():
        (second / file.name).symlink_to(file)
    config = json.loads((first / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] /= 10
    (second / "config.json").unlink()
    (second / "config.json").write_text(json.dumps(config))
    started(first)
    started(first, num_gpu_blocks_override=25)
    started(second)
    compiled = [int(text.split()[0]) for text in programs(caplog.records)]
    assert compiled == [2, 1, 1]  # a draw knows nothing of blocks, nor of models


@pytest.mark.slow
def test_experts_that_lie_otherwise_are_another_program(golden, tokens, started, cache, caplog):
    caplog.set_level(logging.INFO, "jaxgen.engine.programs")
    case = golden("mixtral")
    for whole in (False, True, True):
        engine = started(case.folder, tensor_parallel_size=2, enable_expert_parallel=whole)
        assert tokens(engine, case.prompts) == case.greedy
    compiled = [int(text.split()[0]) for text in programs(caplog.records)]
    assert compiled == [2, 2, 0]


def test_chosen_implementations_are_compiled(golden_dir, started, cache, caplog):
    """The store's keys do not know of them."""
    caplog.set_level(logging.INFO, "jaxgen.engine.programs")
    started(golden_dir("llama_tied"))
    with using(ragged_attention="reference"):
        started(golden_dir("llama_tied"))
    assert [int(text.split()[0]) for text in programs(caplog.records)] == [2, 2]
    assert len(list(cache.iterdir())) == 2
