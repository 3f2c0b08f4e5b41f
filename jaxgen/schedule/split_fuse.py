"""Dynamic SplitFuse: a token budget per step, decodes first, then prompts split to fill it.

`plan` is a pure function: it looks at requests and pools, changes neither, and says what to do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np

from jaxgen.ragged.capacity import Release
from jaxgen.ragged.prefix_cache import Hit
from jaxgen.ragged.rows import StepRows
from jaxgen.schedule.limits import Capacity, Limits
from jaxgen.schedule.preemption import choose_victims, outgrown
from jaxgen.schedule.request import UNKNOWN_TOKEN, Request

MAX_BYPASSED = 16
"""After this many admissions past it, a request that lacks blocks holds back all behind it.

So many of them together do the same."""

LEAST_SHARE = 4
"""A step that is cut to a compiled size has at least the fourth part of what its prompts want."""

_RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a request in this step; before an admitted one's are cached.

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

    decodes: each computes one token, at `starts`, and samples the next. There are hundreds, step
        after step, so that they have no objects of their own.
    prompts: everything else; their rows come after those of the decodes.
    bypassed: waiting requests which lack blocks and rank before an admitted one.
    """

    decodes: Sequence[Request]
    starts: Sequence[int]
    prompts: Sequence[Chunk]
    preempted: Sequence[Request]
    admitted: Sequence[Request]
    bypassed: Sequence[Request]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decodes and not self.prompts

    @property
    def chunks(self) -> list[Chunk]:
        """All rows in the same form, for whoever does not count microseconds."""
        decodes = zip(self.decodes, self.starts, strict=True)
        return [*(Chunk(request, start, 1, True) for request, start in decodes), *self.prompts]

    @property
    def requests(self) -> list[Request]:
        """Whose rows they are, in their order."""
        return [*self.decodes, *[chunk.request for chunk in self.prompts]]

    @property
    def counts(self) -> list[int]:
        """Tokens of each row."""
        return [1] * len(self.decodes) + [chunk.count for chunk in self.prompts]

    def rows(self) -> StepRows:
        """The rows as the packer takes them, once the admitted are tracked."""
        rows = len(self.decodes) + len(self.prompts)
        counts, emit = np.ones(rows, np.int32), np.ones(rows, bool)
        pending = [request.pending for request in self.decodes]
        token_ids = [UNKNOWN_TOKEN] * len(pending)
        if not all(pending):
            for row, request in enumerate(self.decodes):
                if not request.pending:
                    token_ids[row] = request.token_id(self.starts[row])
        for row, chunk in enumerate(self.prompts, start=len(self.decodes)):
            token_ids += chunk.token_ids
            counts[row], emit[row] = chunk.count, chunk.emit
        indices = np.array([request.index for request in self.requests], np.intp)
        return StepRows(indices, counts, np.array(token_ids, np.int32), emit)


def plan(
    waiting: Sequence[Request], running: Iterable[Request], limits: Limits, capacity: Capacity
) -> Plan:
    """The next step for requests that wait and that run, both sorted by rank; none that runs is
    exhausted. Who `waits` is left out.

    1. Each decode gets one token. If blocks lack, the running request that ranks last is preempted,
       until they suffice. Requests that outgrew Limits.recompute_at are preempted too.
    2. Waiting requests are admitted by rank while slots last and the blocks of their whole prompts
       are free, beside those that admitted prompts still need and one block for each other request.
       A preempted request is a prompt of all its tokens; it waits until they are read. Who lacks
       blocks is passed by, MAX_BYPASSED times at most. Nobody is admitted in a step that preempts.
    3. The rest of the budget goes to prompts by `share`, one priority after another. Where others
       are held back for lack of room it ends at one of Limits.sizes: what would be padding is
       worth more to them than a step is to the prompt whose end is put off.
    """
    kept = list(running)
    restarting: list[Request] = []
    release = capacity.release()
    if limits.recompute_at is not None:
        restarting = [request for request in kept if outgrown(request, limits.recompute_at)]
        kept = [request for request in kept if not outgrown(request, limits.recompute_at)]
        for request in restarting:
            release.add(request.uid)
    victims = choose_victims(kept, capacity, release)
    kept = kept[: len(kept) - len(victims)]
    preempted = [*restarting, *victims]

    step = _Step(limits, capacity, release)
    step.decode([request for request in kept if request.decoding and not request.waits])
    prompts = [request for request in kept if not request.decoding and not request.waits]
    passed: list[Request] = []
    candidates: list[Request] = []
    if waiting and not preempted:
        room = min(limits.max_sequences - len(kept), capacity.free_sequences, capacity.free_slots)
        candidates, passed = _admissible(waiting, prompts, step, room, len(kept))
    if limits.sizes and _held_back(waiting, candidates):
        step.end_at_size([*prompts, *candidates])
    for _, group in groupby(sorted([*prompts, *candidates], key=_RANK), key=attrgetter("priority")):
        share(list(group), step)

    admitted: list[Request] = []
    if candidates:
        scheduled = {chunk.request.uid for chunk in step.prompts}
        admitted = [request for request in candidates if request.uid in scheduled]
    last = max((request.rank for request in admitted), default=None)
    bypassed = [request for request in passed if last is not None and request.rank < last]
    return Plan(step.decodes, step.starts, step.prompts, preempted, admitted, bypassed)


class _Step:
    """The step as planned so far, and what is left of the budget and of each group's blocks.

    hits: what waiting requests that were looked at would find in the cache.
    """

    __slots__ = ("budget", "capacity", "decodes", "free", "hits", "limits", "prompts", "starts")

    def __init__(self, limits: Limits, capacity: Capacity, release: Release) -> None:
        self.limits = limits
        self.capacity = capacity
        self.budget = limits.max_tokens
        self.free = [a + b for a, b in zip(capacity.free_blocks, release.blocks, strict=True)]
        self.decodes: list[Request] = []
        self.starts: list[int] = []
        self.prompts: list[Chunk] = []
        self.hits: dict[int, Hit] = {}

    def hit(self, request: Request) -> Hit:
        """What a waiting request would begin with; its last token is computed in any case."""
        names: Sequence[bytes] = ()
        if request.reads_cache and not self.limits.no_chunking:
            names = request.block_names[: (request.total - 1) // self.capacity.block_size]
        self.hits[request.uid] = self.capacity.hit(names)
        return self.hits[request.uid]

    def remaining(self, request: Request) -> int:
        """Tokens to compute until one is sampled, those in the cache apart."""
        hit = self.hits.get(request.uid)
        return request.remaining - (hit.tokens if hit else 0)

    def decode(self, requests: list[Request]) -> None:
        """One token for each, which all fit unless others than requests hold the blocks."""
        size = self.capacity.block_size
        starts = [request.computed for request in requests]
        needed = sum([start % size == 0 for start in starts])
        if needed > min(self.free):
            for request in requests:
                self.give(request, 1)
            return
        self.free = [blocks - needed for blocks in self.free]
        self.budget -= len(requests)
        self.decodes, self.starts = requests, starts

    def end_at_size(self, prompts: Sequence[Request]) -> None:
        """Cuts the budget to the largest compiled size that these prompts fill, if any.

        No cut takes more than three quarters of what they want, so that no prompt goes on in
        single tokens for as long as others are held back.
        """
        begun = self.limits.max_tokens - self.budget
        wanted = begun + min(self.budget, sum(self.remaining(request) for request in prompts))
        least = begun + max(1, (wanted - begun) // LEAST_SHARE)
        filled = [size for size in self.limits.sizes if least <= size <= wanted]
        if filled and not self.limits.no_chunking:
            self.budget = max(filled) - begun

    def give(self, request: Request, tokens: int) -> None:
        """Schedules up to that many more tokens of a request not yet in the step."""
        remaining = self.remaining(request)
        wanted = min(tokens, remaining, self.budget)
        hit = self.hits.get(request.uid)
        free = [a - b for a, b in zip(self.free, hit.taken, strict=True)] if hit else self.free
        count = self.capacity.fitting_tokens(request.uid, wanted, max(0, min(free)))
        if count < 1 or (self.limits.no_chunking and count < remaining):
            return
        self.budget -= count
        needed = self.capacity.blocks_needed(request.uid, count)
        self.free = [blocks - needed for blocks in free]
        start = hit.tokens if hit else request.computed
        self.prompts.append(Chunk(request, start, count, emit=count == remaining))


def share(prompts: list[Request], step: _Step) -> None:
    """Splits the step's budget over prompts of one priority, sorted by rank.

    The oldest is entitled to half, so that it always goes on; the other half goes to the rest by
    rank, but first to those that it could end, so that a short prompt does not wait behind a long
    one; the oldest gets what is left. A prompt that may not be split gets all its tokens or none,
    and the oldest is not halved.
    """
    oldest, *others = prompts
    remaining = step.remaining(oldest)
    half = remaining if step.limits.no_chunking else -(-step.budget // 2)
    other_half = rest = max(0, step.budget - min(half, remaining))
    wishes = []
    for request in sorted(others, key=lambda one: (step.remaining(one) > other_half, one.rank)):
        wish = min(step.remaining(request), rest)
        if wish == 0:
            break
        wishes.append((request, wish))
        rest -= wish
    step.give(oldest, step.budget - sum(wish for _, wish in wishes))
    for request, wish in wishes:
        step.give(request, wish)


def _held_back(waiting: Sequence[Request], candidates: Sequence[Request]) -> bool:
    """Whether anyone who could run is not admitted now."""
    begun = {request.uid for request in candidates}
    return any(
        request.uid not in begun and not (request.pending or request.exhausted or request.waits)
        for request in waiting
    )


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
        if request.pending or request.exhausted or request.waits:
            continue
        whole = not step.limits.no_chunking or request.remaining <= budget
        # Looking up a long prompt takes time; where no block is left the answer is known.
        after = None
        if whole and all(blocks < free for blocks, free in zip(promised, step.free, strict=True)):
            need = step.capacity.blocks_to_begin(request.total, step.hit(request), most)
            after = [a + b for a, b in zip(promised, need, strict=True)]
        if after and all(a <= free for a, free in zip(after, step.free, strict=True)):
            candidates.append(request)
            promised = [blocks + 1 for blocks in after]
            if step.limits.no_chunking:
                budget -= request.remaining
        elif request.bypassed >= MAX_BYPASSED or len(passed) >= MAX_BYPASSED:
            break
        else:
            passed.append(request)
    return candidates, passed
