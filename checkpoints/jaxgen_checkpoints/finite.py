"""Noticing NaN and infinity as weights go by, and only then asking which tensor holds them."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jaxgen_checkpoints.lazy import SourceTensor
from jaxgen_checkpoints.source import printable_name
from jaxgen_checkpoints.weight import Weight

_BLOCK = 1 << 20
"""Values looked at together: small enough to stay in cache."""


def all_finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; at memory speed also for types that numpy lacks."""
    flat = values.reshape(-1)
    return all(_block_is_finite(flat[i : i + _BLOCK]) for i in range(0, flat.size, _BLOCK))


def explain_non_finite(weight: Weight, dtype: np.dtype) -> Iterator[str]:
    """Say for each source tensor of `weight` how many of its values are not finite in `dtype`.

    Reads the tensors again, a block of rows at a time: for weights that are known to be bad.
    """
    for leaf in weight.tensor.leaves():
        nan, infinite, too_large = _count(leaf, dtype)
        counts = ((nan, "NaN"), (infinite, "infinite values"), (too_large, f"beyond {dtype}"))
        found = ", ".join(f"{count} {what}" for count, what in counts if count)
        if found:
            name, origin = printable_name(leaf.info.name), leaf.info.origin
            yield f"{name} ({origin}) holds {found} in {np.prod(leaf.shape)} values"


def _block_is_finite(block: np.ndarray) -> bool:
    bits = {2: np.uint16, 4: np.uint32}.get(block.dtype.itemsize)
    if bits is None:
        return bool(np.isfinite(block).all())
    # A value is not finite where all exponent bits are set; without its sign it is then at least
    # the bit pattern of infinity.
    infinity = np.array(np.inf, block.dtype).view(bits)
    return not block.size or bool((block.view(bits) & ~_sign(bits)).max() < infinity)


def _sign(bits: type) -> np.unsignedinteger:
    return bits(1 << (np.dtype(bits).itemsize * 8 - 1))


def _count(leaf: SourceTensor, dtype: np.dtype) -> np.ndarray:
    total = np.zeros(3, np.int64)
    rows = max(1, _BLOCK // max(1, int(np.prod(leaf.shape[1:]))))
    rest = (slice(None),) * (len(leaf.shape) - 1)
    for start in range(0, leaf.shape[0] if leaf.shape else 1, rows):
        index = (slice(start, min(start + rows, leaf.shape[0])), *rest) if leaf.shape else ()
        values = jnp.asarray(leaf.read(index))
        nan, infinite = jnp.isnan(values).sum(), jnp.isinf(values).sum()
        after = (~jnp.isfinite(values.astype(dtype))).sum()
        total += [int(nan), int(infinite), int(after - nan - infinite)]
    return total
