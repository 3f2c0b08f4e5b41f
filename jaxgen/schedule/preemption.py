"""Who must give up its blocks so that the others go on: the latest of the least important.

A preempted request keeps its output; only its cache is computed again.
"""

from collections.abc import Sequence

from jaxgen.schedule.limits import Capacity, Limits
from jaxgen.schedule.request import Request


def outgrown(request: Request, limits: Limits) -> bool:
    """Whether the request has grown past the length at which its cache must be computed anew."""
    boundary = limits.recompute_at
    return boundary is not None and request.started <= boundary < request.total


def choose_victims(
    running: Sequence[Request], limits: Limits, capacity: Capacity, freed: Sequence[int]
) -> list[Request]:
    """The requests to preempt, from the end of `running` (sorted by rank), so that a step goes on.

    Going on means: one token for each decode, and for the first request, whatever it is. The first
    is never chosen, so it always comes to its end: alone it fits, or it would not have been taken.
    freed: blocks per group that come free in any case.
    """
    free = [have + more for have, more in zip(capacity.free_blocks, freed, strict=True)]
    needs = [
        capacity.blocks_needed(request.uid, 1) if request.remaining == 1 or first else 0
        for first, request in zip([True] + [False] * len(running), running, strict=False)
    ]
    demand, victims = sum(needs), []
    while demand > min(free) and len(victims) + 1 < len(running):
        position = len(running) - 1 - len(victims)
        victims.append(running[position])
        demand -= needs[position]
        held = capacity.blocks_held(running[position].uid)
        free = [have + more for have, more in zip(free, held, strict=True)]
    return victims
