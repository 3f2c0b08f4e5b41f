"""How many KV blocks there are: arithmetic over the device's memory, never trial and error.

Capacity is the memory limit's share, minus the weights, minus what the largest compiled step says
it needs for itself. A CPU has no limit of its own: there the cache has a configured size.
"""

from collections.abc import Callable, Sequence

from jaxgen.config import KVMemory
from jaxgen.engine.model import Model
from jaxgen.engine.pages import block_bytes
from jaxgen.ragged.sequence import CacheGroup
from jaxgen_checkpoints.errors import RefusedInput
from jaxgen_checkpoints.mesh_layout import Device

CPU_CACHE_BYTES = 512 * 2**20
"""KV cache of one CPU device where the configuration names no size."""


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
    temporary_bytes: Callable[[], int],
) -> tuple[int, ...]:
    """Blocks of each cache group.

    Groups share the memory in the proportion in which a long sequence uses them, and get no more
    than max_sequences such sequences could fill, and one block more for each. temporary_bytes:
    asked only where a device's limit counts. RefusedInput where not even one sequence's share of
    each group fits.
    """
    # Admission keeps a block in hand for each running sequence.
    most = tuple((count + 1) * max_sequences for count in per_sequence)
    if memory.num_blocks is not None:
        return (memory.num_blocks,) * len(per_sequence)
    budget, explanation = _budget(memory, model, temporary_bytes)
    sizes = block_bytes(model, block_size)
    one_sequence = sum(n * size for n, size in zip(per_sequence, sizes, strict=True))
    blocks = tuple(
        min(limit, int(budget * count // one_sequence))
        for count, limit in zip(per_sequence, most, strict=True)
    )
    if min(blocks) < 1:
        raise RefusedInput(
            f"no memory is left for the KV cache: {explanation}; one block of {block_size} tokens "
            f"takes {sum(sizes)} bytes. Raise gpu_memory_utilization or kv_cache_memory_bytes, "
            "spread the model over more devices (tensor_parallel_size), or lower "
            "max_num_batched_tokens"
        )
    return blocks


def _budget(memory: KVMemory, model: Model, temporary_bytes: Callable[[], int]) -> tuple[int, str]:
    """Bytes of one device for the cache, and where they come from."""
    if memory.cache_bytes is not None:
        return memory.cache_bytes, f"kv_cache_memory_bytes is {memory.cache_bytes}"
    device = model.mesh.devices.flat[0]
    limit = memory_limit(device)
    if limit is None:
        return CPU_CACHE_BYTES, f"a CPU's cache has {CPU_CACHE_BYTES} bytes unless told otherwise"
    usable = (
        int(limit * memory.utilization)
        if memory.reserve_bytes is None
        else limit - memory.reserve_bytes
    )
    weights, temporary = model.bytes_per_device(), temporary_bytes()
    return usable - weights - temporary, (
        f"of {limit} bytes {usable} may be used, weights take {weights} and the step {temporary}"
    )


def memory_limit(device: Device) -> int | None:
    """Bytes that XLA may allocate on a device; None where the platform does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return None if not stats else stats.get("bytes_limit")
