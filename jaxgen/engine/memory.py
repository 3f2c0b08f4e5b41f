"""How many KV blocks there are: arithmetic over the device's memory, never trial and error.

Capacity is the memory limit's share, minus the weights, minus what the largest compiled step says
it needs for itself. A CPU has no limit of its own: there the cache has a configured size.
"""

import math
from collections.abc import Callable, Sequence

from jaxgen.config import KVMemory
from jaxgen.engine.model import Model
from jaxgen.engine.pages import block_bytes
from jaxgen.ragged.buckets import Buckets
from jaxgen.ragged.sequence import CacheGroup
from jaxgen_checkpoints.errors import ConfigError, RefusedInput
from jaxgen_checkpoints.mesh_layout import Device
from pallas_kernels.dispatch import chosen, target_platform

CPU_CACHE_BYTES = 512 * 2**20
"""KV cache of one CPU device where the configuration names no size."""

_MOST_OF_A_DEVICE = 0.97
"""The largest share that is worth suggesting: the runtime needs some memory of its own."""


def blocks_per_sequence(
    groups: Sequence[CacheGroup], *, block_size: int, max_context: int, step_tokens: int
) -> tuple[int, ...]:
    """The most blocks of each group that a sequence of the longest context holds at once."""
    whole = -(-max_context // block_size)
    return tuple(
        whole
        if group.window is None
        else min(whole, -(-(group.window + step_tokens) // block_size) + 1)
        for group in groups
    )


def plan_blocks(
    memory: KVMemory,
    model: Model,
    per_sequence: Sequence[int],
    *,
    block_size: int,
    max_sequences: int,
    keeps_prefixes: bool,
    limit: int | None,
    temporary_bytes: Callable[[], int],
) -> tuple[int, ...]:
    """Blocks of each cache group.

    Groups share the memory in the proportion in which a long sequence uses them. They get no more
    than max_sequences such sequences could fill, and one block more for each, unless what ended
    sequences leave is of use (keeps_prefixes) and the memory is ours: a device's share, or a size
    by name. limit: bytes of a device, as `memory_limit` says. temporary_bytes: asked only where the
    limit counts. RefusedInput where not even one block of each group fits.
    """
    if memory.num_blocks is not None:
        return (memory.num_blocks,) * len(per_sequence)
    sizes = block_bytes(model, block_size)
    one_sequence = sum(n * size for n, size in zip(per_sequence, sizes, strict=True))
    budget, explanation = _budget(memory, model, limit, one_sequence, temporary_bytes)
    blocks = tuple(int(budget * count // one_sequence) for count in per_sequence)
    ours = memory.cache_bytes is not None or limit is not None
    if not (keeps_prefixes and ours):
        # Admission keeps a block in hand for each running sequence.
        most = ((count + 1) * max_sequences for count in per_sequence)
        blocks = tuple(map(min, blocks, most))
    if min(blocks) < 1:
        raise RefusedInput(
            f"no memory is left for the KV cache: {explanation}; one block of {block_size} tokens "
            f"takes {sum(sizes)} bytes. Raise gpu_memory_utilization or kv_cache_memory_bytes, "
            "spread the model over more devices (tensor_parallel_size), or lower "
            "max_num_batched_tokens"
        )
    return blocks


def _budget(
    memory: KVMemory,
    model: Model,
    limit: int | None,
    one_sequence: int,
    temporary_bytes: Callable[[], int],
) -> tuple[int, str]:
    """Bytes of one device for the cache, and where they come from.

    one_sequence: bytes of the longest sequence's cache.
    """
    if memory.cache_bytes is not None:
        return memory.cache_bytes, f"kv_cache_memory_bytes is {memory.cache_bytes}"
    if limit is None:
        return CPU_CACHE_BYTES, f"a CPU's cache has {CPU_CACHE_BYTES} bytes unless told otherwise"
    weights, temporary = model.bytes_per_device(), temporary_bytes()
    usable = usable_bytes(memory, limit)
    explanation = (
        f"of {limit} bytes {usable} may be used, weights take {weights} and the step {temporary}"
    )
    share = math.ceil(100 * (weights + temporary + one_sequence) / limit) / 100
    if share <= _MOST_OF_A_DEVICE:
        explanation += f" (gpu_memory_utilization = {share} would hold one long sequence)"
    return usable - weights - temporary, explanation


def usable_bytes(memory: KVMemory, limit: int) -> int:
    """What the configuration lets us fill of a device with so many bytes."""
    if memory.reserve_bytes is not None:
        return limit - memory.reserve_bytes
    return int(limit * memory.utilization)


def check_block_tables(buckets: Buckets) -> None:
    """ConfigError where a TPU's scalar memory, in which block tables lie, has no room for them."""
    if target_platform() != "tpu" or chosen():
        return
    # Imported here: Pallas's TPU side takes most of a second to import.
    from pallas_kernels.ragged_attention.tpu_chip import table_too_large

    largest = max(buckets, key=lambda bucket: bucket.rows * bucket.blocks)
    problem = table_too_large(largest.rows, largest.blocks)
    if problem is not None:
        raise ConfigError(problem)


def memory_limit(device: Device) -> int | None:
    """Bytes that XLA may allocate on a device; None where the platform does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return None if not stats else stats.get("bytes_limit")
