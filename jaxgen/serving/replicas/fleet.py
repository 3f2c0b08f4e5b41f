"""All replicas: who takes the next prompts, and what they all are asked."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import httpx

from jaxgen.serving.replicas.replica import Replica, State
from jaxgen_checkpoints.errors import RefusedInput

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_KEPT_SECONDS = 30.0
"""Connections are kept so long; the replicas keep theirs longer, and hang up on no request."""


class Fleet:
    """replicas: as many as environments were given. client: for requests to them."""

    def __init__(
        self, options: Mapping[str, Any], environments: Sequence[Mapping[str, str]]
    ) -> None:
        """options: of `jaxgen serve`, by their names in its parser. environments: one a replica."""
        self.replicas = [
            Replica(str(place), options, environment)
            for place, environment in enumerate(environments)
        ]
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_SECONDS)
        self.client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when all are ready. RefusedInput if one ends before; its own words are above."""
        for replica in self.replicas:
            await replica.start()
            watch = asyncio.create_task(replica.watch(self.client))
            self._watches.append(watch)
        while any(replica.state is not State.READY for replica in self.replicas):
            for replica in self.replicas:
                if replica.state is State.ENDED:
                    message = f"replica {replica.name} did not start: {replica.reason}"
                    raise RefusedInput(message)
            await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self) -> None:
        """Ends all of them."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(replica.stop() for replica in self.replicas))
        await self.client.aclose()

    def take(
        self, prompts: int, *, but: Collection[Replica] = (), first: Replica | None = None
    ) -> Replica | None:
        """The ready one with the fewest prompts, which has these now; None if there is none.

        but: not these. first: this one, if it is ready.
        """
        ready = [each for each in self.ready if each not in but]
        if not ready:
            return None
        chosen = first if first in ready else min(ready, key=_load)
        assert chosen is not None
        chosen.outstanding += prompts
        return chosen

    def deal(self, prompts: int) -> dict[Replica, list[int]]:
        """Places of prompts by who would get each if they came one by one; nobody has them yet."""
        loads = {replica: _load(replica) for replica in self.ready}
        dealt: dict[Replica, list[int]] = {}
        for place in range(prompts if loads else 0):
            chosen = min(loads, key=loads.__getitem__)
            dealt.setdefault(chosen, []).append(place)
            loads[chosen] = (loads[chosen][0] + 1, loads[chosen][1])
        return dealt

    @property
    def ready(self) -> list[Replica]:
        """Those that can be given requests."""
        return [replica for replica in self.replicas if replica.state is State.READY]

    async def ask_all(
        self,
        method: str,
        path: str,
        **options: Any,  # noqa: ANN401 (httpx's own)
    ) -> list[tuple[Replica, httpx.Response]]:
        """What those that are ready answer; one that fails is left out."""

        async def ask(replica: Replica) -> tuple[Replica, httpx.Response] | None:
            try:
                answer = await self.client.request(method, replica.url + path, **options)
            except httpx.TransportError as error:
                logger.warning("replica %s did not answer %s: %s", replica.name, path, error)
                return None
            return replica, answer

        found = await asyncio.gather(*(ask(replica) for replica in self.ready))
        return [pair for pair in found if pair is not None]


def _load(replica: Replica) -> tuple[int, int]:
    return replica.outstanding, replica.served
