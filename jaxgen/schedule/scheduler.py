"""The host's side of the loop: requests that wait, requests that run, and the state they hold.

Each step: `begin_step`, pack and dispatch, `dispatched`; tokens come to `receive` whenever they are
read, usually while the next step runs already.
"""

from bisect import insort
from operator import attrgetter

import numpy as np

from jaxgen.ragged.capacity import Capacity
from jaxgen.ragged.rows import NO_ROWS
from jaxgen.ragged.state import StateManager
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.request import Request, Status
from jaxgen.schedule.split_fuse import Plan, plan
from jaxgen.schedule.verdict import SchedulingError, SchedulingResult, can_ever_run


class Scheduler:
    """Owns all unfinished requests, and applies plans to a StateManager.

    preemptions: how often a request lost its cache to another, or to its own length.
    rows: of the step that was planned last, as the packer takes them; nothing if it was empty.
    """

    __slots__ = (
        "_prefix_cache",
        "_running",
        "_unfinished",
        "_waiting",
        "capacity",
        "limits",
        "preemptions",
        "rows",
        "state",
    )

    def __init__(self, limits: Limits, state: StateManager) -> None:
        """No requests. Others may track sequences in `state`; their blocks are not touched."""
        self.limits = limits
        self.state = state
        self.capacity = Capacity(state)
        self.preemptions = 0
        self.rows = NO_ROWS
        self._prefix_cache = state.prefix_cache
        self._waiting: list[Request] = []
        self._running: dict[int, Request] = {}
        self._unfinished: dict[int, Request] = {}

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests that hold nothing, in the order of service."""
        return tuple(self._waiting)

    @property
    def num_waiting(self) -> int:
        """How many requests hold nothing."""
        return len(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold blocks and a slot, in the order of service."""
        return tuple(self._running.values())

    @property
    def unfinished(self) -> int:
        """Requests that are not finished, those whose last tokens are not read included."""
        return len(self._unfinished)

    def submit(self, request: Request) -> None:
        """Queues a request.

        SchedulingError if it can never be served: its prompt and max_tokens exceed the context, or
        its blocks exceed the pool, or it must not be split and exceeds a step. So if as many wait
        as may. ValueError for a uid in use.
        """
        uid = request.uid
        if uid in self._unfinished or uid in self.state:
            raise ValueError(f"Request {uid} is in the engine already: choose another uid.")
        result = can_ever_run(request, self.limits, self.capacity)
        if result is not SchedulingResult.Success:
            raise SchedulingError(result, self._why_never(request, result))
        most = self.limits.max_waiting
        if most is not None and len(self._waiting) >= most:
            raise SchedulingError(SchedulingResult.QueueLimitExceeded, f"{most} requests wait.")
        self._unfinished[uid] = request
        self._wait(request)

    def _why_never(self, request: Request, result: SchedulingResult) -> str:
        prompt, context = len(request.prompt_ids), self.state.max_context
        if prompt >= context:
            return f"The prompt has {prompt} tokens, the context {context}; one must be generated."
        asked = f"The prompt has {prompt} tokens and asks for {request.max_tokens} more; "
        if result is SchedulingResult.SequenceTokenLimitExceeded:
            return f"{asked}the context has {context}."
        return f"{asked}that exceeds what the engine can hold even if it serves nothing else."

    def begin_step(self) -> Plan:
        """Plans a step and reserves its tokens; the plan may be empty. Follow with `dispatched`.

        Preempted requests lose their state; admitted ones are tracked, with a slot.
        """
        step = plan(self._waiting, self._running.values(), self.limits, self.capacity)
        for request in step.preempted:
            request.preemptions += 1
            self.preemptions += 1
            self._preempt(request)
        for request in step.bypassed:
            request.bypassed += 1
        if step.admitted:
            starts = {chunk.request.uid: chunk.start for chunk in step.prompts}
            for request in step.admitted:
                self._admit(request, starts[request.uid])
            ranked = sorted(self._running.values(), key=attrgetter("rank"))
            self._running = {request.uid: request for request in ranked}
        self.rows = NO_ROWS if step.empty else step.rows()
        if not step.empty:
            self.state.reserve_rows(self.rows.indices, self.rows.counts)
        return step

    def _admit(self, request: Request, cached: int) -> None:
        """Before anything is reserved, which could reclaim cached blocks."""
        self._waiting.remove(request)
        self._running[request.uid] = request
        sequence = self.state.track(request.uid, sampled=True, anchor=self._anchor(request))
        request.begin(sequence.index, cached)
        request.publish_at = cached + self.state.block_size
        if cached:
            blocks = cached // self.state.block_size
            self.state.adopt(request.uid, request.block_names[:blocks])
        if request.cached_tokens is None:
            request.cached_tokens = cached
            if self._prefix_cache is not None and request.reads_cache:
                self._prefix_cache.queried_tokens += len(request.prompt_ids)
                self._prefix_cache.hit_tokens += cached

    def _anchor(self, request: Request) -> int:
        """The length that its rotary frequencies are for: its prompt's, or one past the boundary.

        So a request that is computed anew gives each key the frequencies that it had before.
        """
        boundary = self.limits.recompute_at
        outgrown = boundary is not None and request.total > boundary
        return request.total if outgrown else len(request.prompt_ids)

    def dispatched(self, step: Plan) -> None:
        """The device has the step: its tokens count as computed.

        A request that has sampled all it may gives up its state at once; later steps come after.
        """
        gone: list[int] = []
        for row, request in enumerate(step.decodes):
            if request.status is not Status.RUNNING:
                gone.append(row)  # cancelled between planning and dispatch
                continue
            request.computed += 1
            request.pending += 1
            request.left -= 1
            if request.computed >= request.publish_at:
                self._publish(request)
            if request.left <= 0:
                self._end(request)
                gone.append(row)
        for row, chunk in enumerate(step.prompts, start=len(step.decodes)):
            request = chunk.request
            if request.status is Status.RUNNING:
                request.advance(chunk.count, emit=chunk.emit)
                if request.computed >= request.publish_at:
                    self._publish(request)
                if request.exhausted:
                    self._end(request)
            if request.status is not Status.RUNNING:
                gone.append(row)
        self.state.commit_rows(np.delete(self.rows.indices, gone) if gone else self.rows.indices)

    def _end(self, request: Request) -> None:
        """It has sampled all that it may."""
        del self._running[request.uid]
        self.state.flush(request.uid)
        request.status = Status.ENDING

    def abandon(self, step: Plan) -> None:
        """The step could not be dispatched: what it reserved is free, whom it began waits on."""
        for chunk in step.chunks:
            if chunk.request.status is Status.RUNNING:
                self.state.rollback(chunk.request.uid)
        for request in step.admitted:
            if request.status is Status.RUNNING:
                self._preempt(request)

    def receive(self, request: Request, token: int, *, stop: bool = False) -> bool:
        """The token that the device sampled for the request; False if it came too late to count.

        stop: the token ends the request. So does the last of max_tokens.
        """
        if request.status is Status.FINISHED:
            return False
        request.receive(token)
        if stop or len(request.output_ids) >= request.max_tokens:
            self.finish(request)
        return True

    def finish(self, request: Request) -> None:
        """Ends the request, wherever it stands, and frees what it holds; finished ones stay so."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.WAITING:
            self._waiting.remove(request)
        if request.status is Status.RUNNING:
            self._publish(request)
        self._running.pop(request.uid, None)
        del self._unfinished[request.uid]
        self.state.flush(request.uid)
        request.status = Status.FINISHED

    def _wait(self, request: Request) -> None:
        if self._prefix_cache is not None:
            root = self._prefix_cache.root(self._anchor(request), request.cache_salt)
            if root != request.block_root:
                request.block_root, request.block_names = root, []
            self._name_blocks(request)
        insort(self._waiting, request, key=attrgetter("rank"))

    def _preempt(self, request: Request) -> None:
        self._publish(request)
        del self._running[request.uid]
        self.state.flush(request.uid)
        request.restart()
        self._wait(request)

    def _publish(self, request: Request) -> None:
        """What its dispatched steps fill, as far as the tokens are known, others may share."""
        size = self.state.block_size
        begin, end = request.publish_at // size - 1, min(request.computed, request.known) // size
        if self._prefix_cache is not None and end > begin:
            self._name_blocks(request)
            self.state.publish(request.uid, request.block_names[:end], begin)
            request.publish_at = (end + 1) * size

    def _name_blocks(self, request: Request) -> None:
        """Names all blocks of known tokens that have none yet."""
        assert self._prefix_cache is not None
        names, size = request.block_names, self.state.block_size
        begin = len(names) * size
        token_ids = request.token_ids(begin, request.known - begin)
        self._prefix_cache.extend(request.block_root, names, token_ids)
