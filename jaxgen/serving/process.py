"""A process that serves: how Python collects its garbage there, and hands turns to its threads.

A step of hundreds of streams makes thousands of objects that live until the next one. By default
the collector runs several times in each step, and now and then looks at everything that JAX and the
model's programs keep, all to find nothing: objects here die when their last user lets go of them.

One thread drives the device, another writes to all streams. Each call into XLA lets go of Python's
lock, and the thread that drives gets it back when the other's turn has ended: by default after
5 ms, as long as a step, and several times in each.
"""

import gc
import sys

YOUNG_OBJECTS = 50_000
"""More containers than a step makes: what it makes is gone before the collector looks."""

TURN_SECONDS = 2e-4
"""A small part of a step; shorter ones gained nothing."""


def settle_process() -> None:
    """For a process that does nothing else, once everything is loaded and compiled."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
    sys.setswitchinterval(TURN_SECONDS)
