"""How many KV blocks a device has room for, and what is said where it has none."""

import re

import jax
import pytest

from jaxgen.config import EngineConfig
from jaxgen.engine.cost import Ceilings
from jaxgen.engine.memory import check_block_tables
from jaxgen.plan import Topology, plan_deployment
from jaxgen.plan.chips import Chip
from jaxgen.plan.program import compile_programs
from jaxgen.ragged.buckets import Buckets
from jaxgen_checkpoints.errors import ConfigError, RefusedInput
from jaxgen_checkpoints.json_file import read_json_object
from pallas_kernels.dispatch import lowering_for, using

LIMITS = {"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 8}
LONGEST = 64


@pytest.fixture(scope="module")
def plan(golden_dir):
    """`plan(bytes, **options)`: of a machine whose devices have so much memory."""
    content = read_json_object(golden_dir("llama_plain") / "config.json")
    compiled = []

    def compile_once(*arguments, **sizes):
        if not compiled:
            compiled.extend(compile_programs(*arguments, **sizes))
        return tuple(compiled)

    def on(memory, devices=1, context=None, **options):
        chip = Chip("cpu", memory, Ceilings(1e9, 1e9), 1, 1)
        machine = Topology(f"made:{devices}", jax.devices()[:devices], chip)
        config = EngineConfig.from_any(LIMITS, max_model_len=LONGEST, **options)
        return plan_deployment(content, machine, config, context=context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxgen.plan.deployment.compile_programs", compile_once)
        yield on


def test_prefixes_may_fill_the_device(plan):
    """Ended sequences' blocks are of use; without them, more than all sequences fill is not."""
    roomy = plan(1 << 30)
    memory, block = roomy.memory, roomy.kv_bytes_per_token * LIMITS["block_size"]
    left = memory.usable - memory.weights - memory.temporary
    assert 0 <= left - memory.kv < block
    assert roomy.kv_tokens == roomy.kv_blocks[0] * LIMITS["block_size"]
    plain = plan(1 << 30, enable_prefix_caching=False)
    assert plain.kv_blocks == ((LONGEST // LIMITS["block_size"] + 1) * LIMITS["max_num_seqs"],)


def test_the_share_that_would_help_is_named(plan):
    roomy = plan(1 << 30).memory
    needed = roomy.weights + roomy.temporary
    short = plan(int(needed / 0.75), gpu_memory_utilization=0.7)
    assert "no memory is left for the KV cache" in short.shortfall
    assert f"may be used, weights take {roomy.weights}" in short.shortfall
    (share,) = re.findall(r"gpu_memory_utilization = ([\d.]+) would hold", short.shortfall)
    assert plan(int(needed / 0.75), gpu_memory_utilization=float(share)).fits
    hopeless = plan(needed)
    assert "would hold one long sequence" not in hopeless.shortfall
    assert "lower max_num_batched_tokens" in hopeless.shortfall


def test_a_cache_of_a_given_size_must_fit_too(plan):
    """The engine would find out when it allocates."""
    assert plan(1 << 30, kv_cache_memory_bytes=1 << 29).fits
    for given in ({"kv_cache_memory_bytes": 1 << 31}, {"num_gpu_blocks_override": 1 << 20}):
        too_large = plan(1 << 30, **given)
        assert "GiB short. Lower kv_cache_memory_bytes or num_gpu" in too_large.shortfall
        assert not too_large.fits


@pytest.mark.parametrize("tensor", [3, 8])
def test_replicas_that_do_not_fill_a_machine_are_refused(plan, tensor):
    with pytest.raises(RefusedInput, match=rf"tensor_parallel_size \(now {tensor}\).* divides 4"):
        plan(1 << 30, devices=4, tensor_parallel_size=tensor)


@pytest.mark.parametrize("context", [0, -5, LONGEST + 1])
def test_a_context_that_no_row_can_have_is_refused(plan, context):
    with pytest.raises(RefusedInput, match=rf"max_model_len = {LONGEST}, got {context}"):
        plan(1 << 30, context=context)


def test_tables_beyond_a_tpus_scalar_memory_are_refused_at_start():
    buckets = Buckets.for_limits(max_tokens=256, max_rows=256, max_blocks=2048)
    check_block_tables(buckets)  # a CPU has no such memory
    with lowering_for("tpu"):
        fitting = "lower max_num_seqs or max_model_len, .* 64 rows of so many blocks fit"
        with pytest.raises(ConfigError, match=fitting):
            check_block_tables(buckets)
        check_block_tables(Buckets.for_limits(max_tokens=256, max_rows=64, max_blocks=2048))
        with using(ragged_attention="portable"):
            check_block_tables(buckets)
