"""What a TPU core has room for: vector memory by generation, scalar memory for block tables."""

from jax.experimental.pallas import tpu as pltpu

_SMALLEST = 64 * 2**20  # of v5p and 7x; v5e and v6e have twice as much

_TABLE_BYTES = 512 * 1024
"""Of scalar memory for the block table; every chip has a megabyte."""

_LIST_BYTES = 448 * 1024
"""Of it for the lists of what to do; the compiler keeps the rest."""


def vector_memory() -> int:
    """Bytes that a core has, of the chip that is traced for; the smallest if that is unknown."""
    return pltpu.get_tpu_info().vmem_capacity_bytes if pltpu.is_tpu_device() else _SMALLEST


def limit() -> int:
    """Bytes that a kernel may use: XLA keeps values of its own there."""
    return vector_memory() * 3 // 4


def planned() -> int:
    """Bytes that a kernel's buffers may add up to: the compiler wants room for values between."""
    return vector_memory() // 2


def table_too_large(rows: int, blocks: int) -> str | None:
    """Why a block table does not fit, and what would help; None if it does."""
    if rows * blocks * 4 <= _TABLE_BYTES:
        return None
    return (
        f"a block table of {rows} rows and {blocks} blocks exceeds the {_TABLE_BYTES} bytes of "
        "scalar memory it may take: lower max_num_seqs or max_model_len, or raise block_size; "
        f"{_TABLE_BYTES // 4 // blocks} rows of so many blocks fit"
    )


def lists_too_large(tokens: int, numbers: int) -> str | None:
    """Why so many numbers of a step's work lists do not fit, and what would help."""
    if numbers * 4 <= _LIST_BYTES:
        return None
    return (
        f"the work lists of a step of {tokens} tokens take {numbers * 4} bytes of scalar memory, "
        f"{_LIST_BYTES} are left for them: lower max_num_batched_tokens"
    )
