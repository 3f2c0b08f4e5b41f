"""Python's garbage collector in a process that serves: what is there to stay is not looked at.

A step of hundreds of streams makes thousands of objects that live until the next one. By default
the collector runs several times in each step, and now and then looks at everything that JAX and the
model's programs keep, all to find nothing: objects here die when their last user lets go of them.
"""

import gc

YOUNG_OBJECTS = 50_000
"""More containers than a step makes: what it makes is gone before the collector looks."""


def calm_collector() -> None:
    """To be called once everything is loaded and compiled, in a process that does nothing else."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
