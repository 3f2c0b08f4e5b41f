"""A load on a server: requests sent at their times, whatever becomes of those before them."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxgen.bench.http_client import HTTPClient, Reply
from jaxgen.bench.openai_stream import Backend, Told, request_body
from jaxgen.bench.workload import BenchRequest
from jaxgen_checkpoints.errors import RefusedInput

_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked: a route of a server, in the name of a model.

    extra: members of every body beside prompt and length. request_id_prefix: before each request's
    number, in its X-Request-Id.
    """

    client: HTTPClient
    backend: Backend
    endpoint: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)
    request_id_prefix: str = "bench-"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. Seconds; error is empty if it was answered.

    start: when it was sent, after the run's beginning. queued: how long it had waited before for
    one of max_concurrency places. ttft: until the first piece of output. latency: until the last.
    """

    start: float
    queued: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    gaps: Sequence[float] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All outcomes, in the order of the requests, and the seconds from the first to the last."""

    outcomes: list[Outcome]
    duration: float


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    ended: Callable[[], object] = lambda: None,
) -> LoadRun:
    """Sends requests[i] times[i] seconds after the beginning and waits for all; never raises for
    what a server does. max_concurrency: more than that wait for a place, as at a gateway. ended: is
    called after each.
    """
    places = asyncio.Semaphore(len(requests) if max_concurrency is None else max_concurrency)
    bodies = [_encoded(target, request) for request in requests]
    began = time.perf_counter()

    async def one(number: int) -> Outcome:
        due = began + times[number]
        await asyncio.sleep(due - time.perf_counter())
        arrived = time.perf_counter()
        async with places:
            queued = time.perf_counter() - arrived
            outcome = await _ask(target, bodies[number], number, began, queued)
        ended()
        return outcome

    outcomes = await asyncio.gather(*(one(number) for number in range(len(requests))))
    return LoadRun(outcomes, time.perf_counter() - began)


def _encoded(target: Target, request: BenchRequest) -> bytes:
    body = request_body(target.backend, request, target.model, target.extra)
    return json.dumps(body).encode()


async def _ask(target: Target, body: bytes, number: int, began: float, queued: float) -> Outcome:
    told, sent = Told(), time.perf_counter()
    headers = {"X-Request-Id": f"{target.request_id_prefix}{number}"}
    try:
        reply = await target.client.send(
            "POST", target.endpoint, body, headers=headers, on_piece=told.push
        )
    except (OSError, ValueError) as error:
        return Outcome(sent - began, queued, error=f"{type(error).__name__}: {error}")
    error = _what_failed(reply, told)
    if error or told.first is None or told.last is None:
        return Outcome(sent - began, queued, error=error or "the stream had no output")
    return Outcome(
        start=sent - began,
        queued=queued,
        ttft=told.first - sent,
        latency=told.last - sent,
        gaps=told.gaps,
        prompt_tokens=told.prompt_tokens or 0,
        output_tokens=told.output_tokens or 0,
        text="".join(told.text),
    )


def _what_failed(reply: Reply, told: Told) -> str:
    if reply.status != 200:
        return f"status {reply.status}: {reply.body[:500].decode(errors='replace')}"
    if told.error is None and told.output_tokens is None:
        return "the stream told no usage: the server must know stream_options.include_usage"
    return told.error or ""


async def ask_once(target: Target, request: BenchRequest) -> Outcome:
    """One request outside of any run: to try the route, or to warm the server up."""
    run = await run_load(target, [request], [0.0])
    return run.outcomes[0]


async def wait_until_ready(target: Target, request: BenchRequest, seconds: float) -> None:
    """Asks until an answer comes; RefusedInput with the last error when the seconds are over."""
    end = time.monotonic() + seconds
    while (outcome := await ask_once(target, request)).error:
        if time.monotonic() + _RETRY_SECONDS > end:
            raise RefusedInput(
                f"{target.client.url}{target.endpoint} gave no answer for {seconds:g} s: "
                f"{outcome.error}"
            )
        await asyncio.sleep(_RETRY_SECONDS)


async def first_model(client: HTTPClient) -> tuple[str, str]:
    """The name of the server's first model, and what it is a name of (its root, or the name)."""
    try:
        reply = await client.send("GET", "/v1/models")
        entry = json.loads(reply.body)["data"][0]
        return entry["id"], entry.get("root") or entry["id"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RefusedInput(
            f"{client.url}/v1/models names no model ({error}): give --model, or check that the "
            "server runs there"
        ) from error
