"""Dynamic SplitFuse: a token budget per step, decodes first, then prompts split to fill it.

`plan` is a pure function: it looks at requests and pools, changes neither, and says what to do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from jaxgen.schedule.limits import Capacity, Limits
from jaxgen.schedule.preemption import choose_victims, outgrown
from jaxgen.schedule.request import Request

MAX_BYPASSED = 16
"""After this many admissions past it, a request that lacks blocks holds back all behind it.

So many of them together do the same."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a request in this step.

    emit: they reach the end of what is known, so that a token is sampled.
    """

    request: Request
    start: int
    count: int
    emit: bool

    @property
    def token_ids(self) -> list[int]:
        """The chunk's token ids; UNKNOWN_TOKEN for one that only the device knows."""
        return self.request.token_ids(self.start, self.count)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: first flush the preempted, then track the admitted, then compute the chunks.

    bypassed: waiting requests which lack blocks and rank before an admitted one.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...]
    admitted: tuple[Request, ...]
    bypassed: tuple[Request, ...]


def plan(
    waiting: Sequence[Request], running: Iterable[Request], limits: Limits, capacity: Capacity
) -> Plan:
    """The next step for requests that wait, sorted by rank, and run; none running is exhausted.

    1. Each decode gets one token. If blocks lack, the running request that ranks last is preempted,
       until they suffice. Requests that outgrew Limits.recompute_at are preempted too.
    2. Waiting requests are admitted by rank while slots last and the blocks of their whole prompts
       are free, beside those that admitted prompts still need and one block for each other request.
       A preempted request is a prompt of all its tokens; it waits until they are read. Who lacks
       blocks is passed by, MAX_BYPASSED times at most. Nobody is admitted in a step that preempts.
    3. The rest of the budget goes to prompts by `share`, one priority after another.
    """
    ranked = sorted(running, key=lambda request: request.rank)
    restarting = [request for request in ranked if outgrown(request, limits)]
    kept = [request for request in ranked if not outgrown(request, limits)]
    freed = _held(restarting, capacity)
    victims = choose_victims(kept, limits, capacity, freed)
    kept = kept[: len(kept) - len(victims)]
    preempted = [*restarting, *victims]

    step = _Step(limits, capacity, _held(preempted, capacity))
    for request in kept:
        if request.remaining == 1:
            step.give(request, 1)
    prompts = [request for request in kept if request.remaining > 1]
    passed: list[Request] = []
    candidates: list[Request] = []
    if not victims:
        room = min(
            limits.max_sequences - len(kept),
            capacity.free_sequences + len(preempted),
            capacity.free_slots + len(preempted),
        )
        candidates, passed = _admissible(waiting, prompts, step, room, len(kept))
    for _, group in groupby(
        sorted([*prompts, *candidates], key=lambda request: request.rank),
        key=lambda request: request.priority,
    ):
        share(list(group), step)

    scheduled = {chunk.request.uid for chunk in step.chunks}
    admitted = [request for request in candidates if request.uid in scheduled]
    last = max((request.rank for request in admitted), default=None)
    bypassed = [request for request in passed if last is not None and request.rank < last]
    return Plan(tuple(step.chunks), tuple(preempted), tuple(admitted), tuple(bypassed))


class _Step:
    """The step as planned so far, and what is left of the budget and of each group's blocks."""

    __slots__ = ("budget", "capacity", "chunks", "free", "limits")

    def __init__(self, limits: Limits, capacity: Capacity, freed: Sequence[int]) -> None:
        self.limits = limits
        self.capacity = capacity
        self.budget = limits.max_tokens
        self.free = [a + b for a, b in zip(capacity.free_blocks, freed, strict=True)]
        self.chunks: list[Chunk] = []

    def give(self, request: Request, tokens: int) -> None:
        """Schedules up to that many more tokens of a request not yet in the step."""
        remaining = request.remaining
        wanted = min(tokens, remaining, self.budget)
        count = self.capacity.fitting_tokens(request.uid, wanted, min(self.free))
        if count < 1 or (self.limits.no_chunking and count < remaining):
            return
        self.budget -= count
        needed = self.capacity.blocks_needed(request.uid, count)
        if needed:
            self.free = [blocks - needed for blocks in self.free]
        emit = count == remaining
        self.chunks.append(Chunk(request, start=request.computed, count=count, emit=emit))


def share(prompts: list[Request], step: _Step) -> None:
    """Splits the step's budget over prompts of one priority, sorted by rank.

    The oldest is entitled to half, so that it always goes on; the other half goes to the shortest
    remaining prompts first, so that they do not wait behind a long one; the oldest gets what is
    left. A prompt that may not be split gets all its tokens or none, and the oldest is not halved.
    """
    oldest, *others = prompts
    half = oldest.remaining if step.limits.no_chunking else -(-step.budget // 2)
    rest = max(0, step.budget - min(half, oldest.remaining))
    wishes = []
    for request in sorted(others, key=lambda request: (request.remaining, request.rank)):
        wish = min(request.remaining, rest)
        if wish == 0:
            break
        wishes.append((request, wish))
        rest -= wish
    step.give(oldest, step.budget - sum(wish for _, wish in wishes))
    for request, wish in wishes:
        step.give(request, wish)


def _admissible(
    waiting: Sequence[Request], prompts: list[Request], step: _Step, room: int, running: int
) -> tuple[list[Request], list[Request]]:
    """(requests that may be begun, requests passed by for lack of blocks or budget), by rank."""
    most = step.limits.max_tokens
    promised = [running] * len(step.free)
    for request in prompts:
        finish = step.capacity.blocks_to_finish(request.uid, request.remaining, most)
        promised = [a + b for a, b in zip(promised, finish, strict=True)]
    candidates: list[Request] = []
    passed: list[Request] = []
    budget = step.budget
    for request in waiting:
        if len(candidates) >= room or budget < 1:
            break
        if request.pending or request.exhausted:
            continue
        need = step.capacity.blocks_to_finish(request.uid, request.remaining, most)
        after = [a + b for a, b in zip(promised, need, strict=True)]
        whole = not step.limits.no_chunking or request.remaining <= budget
        if whole and all(a <= free for a, free in zip(after, step.free, strict=True)):
            candidates.append(request)
            promised = [blocks + 1 for blocks in after]
            if step.limits.no_chunking:
                budget -= request.remaining
        elif request.bypassed >= MAX_BYPASSED or len(passed) >= MAX_BYPASSED:
            break
        else:
            passed.append(request)
    return candidates, passed


def _held(requests: list[Request], capacity: Capacity) -> list[int]:
    held = [capacity.blocks_held(request.uid) for request in requests]
    return [sum(blocks) for blocks in zip(*held, strict=True)] or [0] * len(capacity.free_blocks)
