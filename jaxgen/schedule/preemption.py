"""Who must give up its blocks so that the others go on: the latest of the least important.

A preempted request keeps its output; only its cache is computed again, as far as it is not found.
"""

from collections.abc import Sequence

from jaxgen.ragged.capacity import Release
from jaxgen.schedule.limits import Capacity
from jaxgen.schedule.request import Request


def outgrown(request: Request, boundary: int) -> bool:
    """Whether the request has grown past the length at which its cache must be computed anew."""
    return request.started <= boundary < request.total


def choose_victims(
    running: Sequence[Request], capacity: Capacity, release: Release
) -> list[Request]:
    """The requests to preempt, from the end of `running` (sorted by rank), so that a step goes on.

    Going on means: one token for each decode, and for the first request, whatever it is. The first
    is never chosen, so it always comes to its end: alone it fits, or it would not have been taken.
    release: sequences that are flushed in any case; the victims join them.
    """

    def free() -> int:
        return min(
            have + more for have, more in zip(capacity.free_blocks, release.blocks, strict=True)
        )

    if len(running) <= free():
        return []  # a token needs a block at most
    needs = [
        capacity.blocks_needed(request.uid, 1) if request.decoding or first else 0
        for first, request in zip([True] + [False] * len(running), running, strict=False)
    ]
    demand, victims = sum(needs), []
    while demand > free() and len(victims) + 1 < len(running):
        position = len(running) - 1 - len(victims)
        victims.append(running[position])
        demand -= needs[position]
        release.add(running[position].uid)
    return victims
