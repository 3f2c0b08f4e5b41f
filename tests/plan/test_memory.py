"""How many KV blocks a device has room for, and what is said where it has none."""

import re

import jax
import pytest

from jaxgen.config import EngineConfig
from jaxgen.engine.cost import Ceilings
from jaxgen.engine.memory import check_block_tables
from jaxgen.plan import Topology, plan_deployment
from jaxgen.plan.chips import Chip
from jaxgen.ragged.buckets import Buckets
from jaxgen_checkpoints.errors import ConfigError
from jaxgen_checkpoints.json_file import read_json_object
from pallas_kernels.dispatch import lowering_for, using

LIMITS = {"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 8}
LONGEST = 64


@pytest.fixture(scope="module")
def plan(golden_dir):
    """`plan(bytes, **options)`: of a device with so much memory."""
    content = read_json_object(golden_dir("llama_plain") / "config.json")

    def on(memory, **options):
        machine = Topology(
            "made:1", jax.devices()[:1], Chip("cpu", memory, Ceilings(1e9, 1e9), 1, 1)
        )
        config = EngineConfig.from_any(LIMITS, max_model_len=LONGEST, **options)
        return plan_deployment(content, machine, config)

    return on


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


def test_tables_beyond_a_tpus_scalar_memory_are_refused_at_start():
    buckets = Buckets.for_limits(max_tokens=256, max_rows=256, max_blocks=2048)
    check_block_tables(buckets)  # a CPU has no such memory
    with lowering_for("tpu"):
        with pytest.raises(ConfigError, match="lower max_num_seqs or max_model_len"):
            check_block_tables(buckets)
        check_block_tables(Buckets.for_limits(max_tokens=256, max_rows=64, max_blocks=2048))
        with using(ragged_attention="portable"):
            check_block_tables(buckets)
