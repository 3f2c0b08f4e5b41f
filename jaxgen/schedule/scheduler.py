"""The host's side of the loop: requests that wait, requests that run, and the state they hold.

Each step: `begin_step`, pack and dispatch, `dispatched`; tokens come to `receive` whenever they are
read, usually while the next step runs already.
"""

from bisect import insort

from jaxgen.ragged.capacity import Capacity
from jaxgen.ragged.state import StateManager
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.request import Request, Status
from jaxgen.schedule.split_fuse import Plan, plan
from jaxgen.schedule.verdict import SchedulingError, SchedulingResult, can_ever_run


class Scheduler:
    """Owns all unfinished requests, and applies plans to a StateManager."""

    __slots__ = ("_running", "_unfinished", "_waiting", "capacity", "limits", "state")

    def __init__(self, limits: Limits, state: StateManager) -> None:
        """No requests. Others may track sequences in `state`; their blocks are not touched."""
        self.limits = limits
        self.state = state
        self.capacity = Capacity(state)
        self._waiting: list[Request] = []
        self._running: dict[int, Request] = {}
        self._unfinished: dict[int, Request] = {}

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests that hold nothing, in the order of service."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold blocks and a slot."""
        return tuple(self._running.values())

    @property
    def unfinished(self) -> int:
        """Requests that are not finished, those whose last tokens are not read included."""
        return len(self._unfinished)

    def submit(self, request: Request) -> None:
        """Queues a request; its max_tokens is lowered to what the context leaves.

        SchedulingError if it can never be served: its prompt leaves no room in the context, or its
        blocks exceed the pool, or it must not be split and exceeds a step. ValueError for a uid in
        use.
        """
        uid = request.uid
        if uid in self._unfinished or uid in self.state:
            raise ValueError(f"Request {uid} is in the engine already: choose another uid.")
        prompt, context = len(request.prompt_ids), self.state.max_context
        if prompt >= context:
            raise SchedulingError(
                SchedulingResult.SequenceTokenLimitExceeded,
                f"The prompt has {prompt} tokens, the context {context}; one must be generated.",
            )
        request.max_tokens = min(request.max_tokens, context - prompt)
        result = can_ever_run(request, self.limits, self.capacity)
        if result is not SchedulingResult.Success:
            raise SchedulingError(
                result,
                f"The prompt has {prompt} tokens and asks for {request.max_tokens} more; that "
                "exceeds what the engine can hold even if it serves nothing else.",
            )
        self._unfinished[uid] = request
        self._wait(request)

    def begin_step(self) -> Plan:
        """Plans a step and reserves its tokens; the plan may be empty. Follow with `dispatched`.

        Preempted requests lose their state; admitted ones are tracked, with a slot.
        """
        step = plan(self._waiting, self._running.values(), self.limits, self.capacity)
        for request in step.preempted:
            self._preempt(request)
        for request in step.bypassed:
            request.bypassed += 1
        for request in step.admitted:
            self._waiting.remove(request)
            self._running[request.uid] = request
            self.state.track(request.uid, sampled=True, anchor=self._anchor(request))
            request.status = Status.RUNNING
        for chunk in step.chunks:
            self.state.reserve(chunk.request.uid, chunk.count)
        return step

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
        for chunk in step.chunks:
            request = chunk.request
            if request.status is not Status.RUNNING:
                continue  # cancelled between planning and dispatch
            self.state.commit(request.uid)
            request.advance(chunk.count, emit=chunk.emit)
            if request.exhausted:
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
        self._running.pop(request.uid, None)
        del self._unfinished[request.uid]
        self.state.flush(request.uid)
        request.status = Status.FINISHED

    def _wait(self, request: Request) -> None:
        insort(self._waiting, request, key=lambda waiting: waiting.rank)

    def _preempt(self, request: Request) -> None:
        del self._running[request.uid]
        self.state.flush(request.uid)
        request.restart()
        self._wait(request)
