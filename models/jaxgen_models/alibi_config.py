"""ALiBi (Press et al., arXiv:2108.12409): scores fall with the distance, at a slope of each head's
own.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiConfig:
    """slopes: what a step of distance takes off the scores of each query head.

    kv_heads: by which the query heads are dealt over the mesh. rounded_scale: None, or that the
    bias of a key at position j is the slope times j, both rounded to bfloat16, times this number.
    """

    slopes: tuple[float, ...]
    kv_heads: int
    rounded_scale: float | None = None


def published_slopes(heads: int) -> tuple[float, ...]:
    """The paper's slopes, in float32: a geometric sequence for a power of two, and for other counts
    every second one of the next power behind it.
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = _geometric(whole, np.arange(1, whole + 1))
    extra = _geometric(2 * whole, np.arange(1, 2 * (heads - whole) + 1, 2))
    return tuple(float(slope) for slope in (*slopes, *extra))


def _geometric(count: int, powers: np.ndarray) -> np.ndarray:
    base = np.float32(2.0 ** -(2.0 ** -(math.log2(count) - 3)))
    return np.power(base, powers.astype(np.float32))
