"""The scheduler against a clock instead of a device: what a policy does to those who wait.

Steps take what a cost model says; everything else is the engine's own scheduler and state, one step
ahead of the device as in service.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxgen.ragged.buckets import Buckets
from jaxgen.ragged.state import StateManager
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.request import Request
from jaxgen.schedule.scheduler import Scheduler
from jaxgen.schedule.split_fuse import Plan
from jaxgen.schedule.verdict import SchedulingError

_A_TOKEN = 1
"""What every row draws: ends are by count, so that any will do."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: base, what weights and new tokens take together, and attention.

    per_token: of the matrix products, whose weights take `weights` to be read, however few tokens
    there are. per_kv_token: of each token that is attended to.
    """

    base: float
    per_token: float
    per_kv_token: float
    weights: float = 0.0

    def seconds(self, tokens: int, kv_tokens: int) -> float:
        """Of a step with so many new tokens, whose rows have kv_tokens in all."""
        products = max(self.weights, self.per_token * tokens)
        return self.base + products + self.per_kv_token * kv_tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes `time` seconds after the start; it ends after max_tokens."""

    time: float
    prompt_ids: Sequence[int]
    max_tokens: int
    priority: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of an arrival: when each of its tokens was read, in seconds after the start."""

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)
    refused: bool = False

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.arrival.time

    @property
    def tpot(self) -> float:
        """Seconds between tokens after the first, on average; 0 for a single one."""
        return (self.token_times[-1] - self.token_times[0]) / max(1, len(self.token_times) - 1)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Everything that a replay tells: outcomes in the order of arrival, and counts."""

    outcomes: list[Outcome]
    steps: int
    computed_tokens: int
    padding_tokens: int
    preemptions: int

    def summary(self) -> dict[str, float]:
        """Percentiles in milliseconds and rates per second, of the requests that were served."""
        served = [outcome for outcome in self.outcomes if not outcome.refused]
        tokens = sum(len(outcome.token_times) for outcome in served)
        begin = min((outcome.arrival.time for outcome in self.outcomes), default=0.0)
        end = max((outcome.token_times[-1] for outcome in served), default=begin)
        seconds = max(end - begin, 1e-9)
        times = {
            "ttft": [outcome.ttft for outcome in served],
            "tpot": [outcome.tpot for outcome in served if len(outcome.token_times) > 1],
            "e2el": [outcome.token_times[-1] - outcome.arrival.time for outcome in served],
        }
        return {
            "completed": len(served),
            "refused": len(self.outcomes) - len(served),
            "duration": seconds,
            "request_throughput": len(served) / seconds,
            "output_throughput": tokens / seconds,
            "steps": self.steps,
            "computed_tokens": self.computed_tokens,
            "padding_tokens": self.padding_tokens,
            "preemptions": self.preemptions,
            **dict(_percentiles(times)),
        }


def replay(
    arrivals: Sequence[Arrival],
    limits: Limits,
    state: StateManager,
    cost: CostModel,
    *,
    buckets: Buckets | None = None,
    depth: int = 1,
) -> Replayed:
    """Serves the arrivals, sorted by time, to the last token of the last.

    state: an empty one. buckets: what steps are padded to; None for nothing. depth: steps that are
    dispatched before the one before them is read.
    """
    scheduler = Scheduler(limits, state)
    outcomes = [Outcome(arrival) for arrival in arrivals]
    in_flight: deque[tuple[float, Plan]] = deque()
    now = device_free = 0.0
    coming, steps, computed, padding = 0, 0, 0, 0
    while coming < len(arrivals) or scheduler.unfinished:
        while coming < len(arrivals) and arrivals[coming].time <= now:
            _submit(scheduler, coming, outcomes[coming])
            coming += 1
        plan = scheduler.begin_step()
        if not plan.empty:
            tokens = int(scheduler.rows.counts.sum())
            held = tokens if buckets is None else buckets.fit(plan.counts).tokens
            device_free = max(device_free, now) + cost.seconds(held, _kv_tokens(scheduler))
            scheduler.dispatched(plan)
            in_flight.append((device_free, plan))
            steps, computed, padding = steps + 1, computed + tokens, padding + held - tokens
        if in_flight and (plan.empty or len(in_flight) > depth):
            done, step = in_flight.popleft()
            now = max(now, done)
            _read(scheduler, step, outcomes, now)
        elif plan.empty and coming < len(arrivals):
            now = max(now, arrivals[coming].time)
    return Replayed(outcomes, steps, computed, padding, scheduler.preemptions)


def _submit(scheduler: Scheduler, uid: int, outcome: Outcome) -> None:
    arrival = outcome.arrival
    try:
        scheduler.submit(
            Request(
                uid,
                arrival.prompt_ids,
                max_tokens=arrival.max_tokens,
                priority=arrival.priority,
                arrival=arrival.time,
            )
        )
    except SchedulingError:
        outcome.refused = True


def _kv_tokens(scheduler: Scheduler) -> int:
    rows, arrays = scheduler.rows.indices, scheduler.state.arrays
    return int((arrays.seen[rows] + arrays.in_flight[rows]).sum())


def _read(scheduler: Scheduler, step: Plan, outcomes: list[Outcome], now: float) -> None:
    for chunk in step.chunks:
        if chunk.emit and scheduler.receive(chunk.request, _A_TOKEN):
            outcomes[chunk.request.uid].token_times.append(now)


def _percentiles(times: dict[str, list[float]]) -> Iterator[tuple[str, float]]:
    for name, seconds in times.items():
        values = 1e3 * np.array(seconds or [0.0])
        yield f"mean_{name}_ms", float(values.mean())
        for percent in (50, 90, 99):
            yield f"p{percent}_{name}_ms", float(np.percentile(values, percent))
