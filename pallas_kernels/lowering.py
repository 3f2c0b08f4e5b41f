"""Lowering, one program at a time.

Mosaic GPU keeps in a global whether the code that it is writing is for a single thread of the
device (`_ONCE_PER` of jax.experimental.mosaic.gpu.utils, jax 0.11.2 to 0.12.0.1). Where two threads
of Python lower at once, one may find what the other left there: what one thread of the device
should do, such as counting itself in, is then done by all of them, and numbers are wrong without
an error. Eight threads at once lose something in one program of twelve. Lowering is Python, which
runs one thread at a time anyway.
"""

import threading
from typing import Any

from jax.stages import Lowered, Wrapped

_TURN = threading.RLock()  # what is being lowered may lower something itself


def lower(jitted: Wrapped, *arguments: Any) -> Lowered:  # noqa: ANN401
    """`jitted.lower(*arguments)`, waiting for other threads that lower. Compile it where you like.

    A jitted function that is called lowers itself, without waiting: call what was compiled instead
    where other threads may lower.
    """
    with _TURN:
        return jitted.lower(*arguments)
