"""Memory for the small arrays of steps, so that they do not move what is large.

A step's temporaries lie at the front of the device's free memory, wherever that begins. Metadata
and sampled tokens, for which there is no smaller hole, are cut off the same front, and live until
they are read: the next step's temporaries then begin elsewhere, and everything that XLA recorded
with their addresses is recorded again. So there are smaller holes.
"""

import jax
import numpy as np
from jax.sharding import Sharding

PARTS = 8
PART_BYTES = 2**20
"""More than all small arrays of the steps in flight, and less than the temporaries of a step."""


def make_holes(everywhere: Sharding) -> list[jax.Array]:
    """Leaves PARTS free holes of PART_BYTES on every device of a replicated sharding.

    Returns the arrays between them, without which they would be one with the free memory behind:
    whoever wants the holes holds these. XLA's allocator (best fit with coalescing) serves an array
    from the smallest hole that is large enough.
    """
    part = np.zeros(PART_BYTES, np.uint8)
    parts = [jax.device_put(part, everywhere) for _ in range(2 * PARTS)]
    jax.block_until_ready(parts)
    return parts[1::2]
