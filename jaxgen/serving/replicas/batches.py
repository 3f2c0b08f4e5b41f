"""Requests of several prompts: each prompt goes to the replica with the fewest, and the answers
are put together as if one had given them.

A stream of several prompts stays whole: one replica has all of it.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxgen.serving.bodies import parse_object
from jaxgen.serving.connection import JSONAnswer, while_connected
from jaxgen.serving.errors import ApiError, unavailable
from jaxgen.serving.replicas.fleet import Fleet
from jaxgen.serving.replicas.passing import reach, whole
from jaxgen.serving.replicas.replica import Replica

MOST_READ = 128 * 1024
"""Bytes of a body that is read for its prompts; a longer one is passed on as one prompt."""

_FIELDS = ("prompt", "prompts", "text", "input_ids")

type Merge = Callable[["Batch", Sequence[tuple[list[int], Any]]], Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """A body that asks for several prompts, which are its member `field`."""

    body: dict[str, Any]
    field: str

    @property
    def prompts(self) -> list[Any]:
        """All of them."""
        return self.body[self.field]

    def part(self, places: Sequence[int]) -> bytes:
        """The body for some of them."""
        chosen = [self.prompts[place] for place in places]
        return json.dumps({**self.body, self.field: chosen}).encode()


def batch_of(body: bytes, depth: int) -> Batch | None:
    """None where there is one prompt, or nothing that can be read: a replica says what is wrong."""
    if not body or len(body) > MOST_READ:
        return None
    try:
        held = parse_object(body, depth)
    except ApiError:
        return None
    fields = [name for name in _FIELDS if held.get(name) is not None]
    if len(fields) != 1 or not isinstance(held[fields[0]], list):
        return None
    prompts = held[fields[0]]
    if len(prompts) < 2 or any(isinstance(each, int) for each in prompts):
        return None
    return Batch(held, fields[0])


def merge_for(path: str, batch: Batch) -> Merge | None:
    """How the answers of parts become one; None where the batch must stay together."""
    if batch.body.get("stream"):
        return None
    if path == "/v1/completions":
        return _completions
    if path.startswith("/mii/") or (path == "/generate" and _alike(batch)):
        return _lists
    return None


async def pass_parts(fleet: Fleet, request: Request, batch: Batch, merge: Merge) -> Response:
    """The answers of all parts as one; or the first refusal."""
    parts = fleet.deal(len(batch.prompts))
    if not parts:
        raise unavailable("no replica is ready")
    asking = _ask_all(fleet, request, batch, parts)
    answers = await while_connected(request.receive, asking)
    for answer in answers:
        if answer.status_code != 200:
            return answer
    told = [json.loads(bytes(answer.body)) for answer in answers]
    return JSONAnswer(merge(batch, list(zip(parts.values(), told, strict=True))))


async def _ask_all(
    fleet: Fleet, request: Request, batch: Batch, parts: dict[Replica, list[int]]
) -> list[Response]:
    async def ask(replica: Replica, places: list[int]) -> Response:
        body = batch.part(places)
        return await whole(*await reach(fleet, request, body, len(places), first=replica))

    tasks = [asyncio.create_task(ask(replica, places)) for replica, places in parts.items()]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _completions(batch: Batch, told: Sequence[tuple[list[int], Any]]) -> Any:  # noqa: ANN401
    n = len(told[0][1]["choices"]) // len(told[0][0])
    choices: list[dict[str, Any]] = []
    for places, answer in told:
        for choice in answer["choices"]:
            place, index = divmod(choice["index"], n)
            choices.append({**choice, "index": places[place] * n + index})
    usages = [answer["usage"] for _, answer in told]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage: dict[str, Any] = {name: sum(each[name] for each in usages) for name in names}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    choices.sort(key=lambda choice: choice["index"])
    return {**told[0][1], "choices": choices, "usage": usage}


def _lists(batch: Batch, told: Sequence[tuple[list[int], Any]]) -> list[Any]:
    n = len(told[0][1]) // len(told[0][0])
    found: dict[int, Any] = {}
    for places, answers in told:
        for place, entry in enumerate(answers):
            found[places[place // n] * n + place % n] = entry
    return [found[place] for place in sorted(found)]


def _alike(batch: Batch) -> bool:
    """Whether nothing else in the body is a list with an entry for each prompt."""
    return not any(
        isinstance(value, list) for name, value in batch.body.items() if name != batch.field
    )
