"""What happens to query and key heads between the QKV product and attention: norm, rotation."""

from dataclasses import dataclass, field
from typing import Any

import jax

type Leaf = Any
"""An array, or what stands for one in the same tree."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Rotation:
    """How the first 2 * half channels of each token's heads turn: channel i with i + half, or
    2i with 2i + 1 where they are interleaved. cos and sin are float32 [tokens, half].
    """

    cos: Leaf
    sin: Leaf
    interleaved: bool = field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square norms of query and key heads, before they turn: x / rms(x) * weight.

    queries, keys: weights [head]. offset: what is added to the weights, 0 or 1.
    """

    queries: Leaf
    keys: Leaf
    eps: float = field(metadata={"static": True})
    offset: float = field(default=0.0, metadata={"static": True})
