"""A deployment's client: prompts go over HTTP, each on its own, so that all replicas get some."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import httpx

from jaxgen.commands.serve_options import API_KEY_VARIABLE
from jaxgen.deployments.processes import stop
from jaxgen.deployments.records import Deployment, forget, read_record
from jaxgen.pipelines import Response, read_params
from jaxgen_checkpoints.errors import RefusedInput

_MOST_AT_ONCE = 256


class Client:
    """Calls a deployment as if it were a pipeline. Safe to use from several threads."""

    def __init__(self, deployment: Deployment, *, api_key: str | None = None) -> None:
        """api_key: default the first in $JAXGEN_API_KEY, if there is one."""
        self.name = deployment.name
        self.url = deployment.url
        self._pid = deployment.pid
        key = api_key or os.environ.get(API_KEY_VARIABLE, "").partition(",")[0]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(timeout=None, headers=headers)

    def __call__(
        self,
        prompts: str | Sequence[str],
        *,
        streaming_fn: Callable[[list[Response]], object] | None = None,
        **params: Any,  # noqa: ANN401 (GenerateParams, checked by name)
    ) -> list[Response] | None:
        """As `generate`."""
        return self.generate(prompts, streaming_fn=streaming_fn, **params)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        streaming_fn: Callable[[list[Response]], object] | None = None,
        **params: Any,  # noqa: ANN401 (GenerateParams, checked by name)
    ) -> list[Response] | None:
        """One Response a prompt, in order; the server has each done by its least busy replica.

        streaming_fn: called with one Response for each new piece of text, for one prompt; nothing
        is returned then. RefusedInput for what the server refuses, ConnectionError if it is gone
        or this client closed.
        """
        read_params(params)  # wrong names are refused here, before anything is sent
        if self._http.is_closed:
            raise ConnectionError(
                f"this client of deployment {self.name!r} is closed: jaxgen.client gives another "
                "one, jaxgen.serve starts the deployment anew if it was terminated"
            )
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if streaming_fn is not None:
            if len(texts) != 1:
                raise RefusedInput(f"one prompt can be streamed, {len(texts)} were given")
            self._stream(texts[0], streaming_fn, params)
            return None
        if not texts:
            return []
        with ThreadPoolExecutor(max_workers=min(len(texts), _MOST_AT_ONCE)) as pool:
            return list(pool.map(lambda text: self._ask(text, params), texts))

    def terminate_server(self) -> None:
        """Stops this deployment, which must be on this machine, and waits."""
        if is_served(self.name, self.url):  # otherwise its number may be another process' by now
            stop(self._pid)
        forget(self.name)
        self.close()

    def close(self) -> None:
        """Lets go of the connections; the deployment runs on."""
        self._http.close()

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes it."""
        self.close()

    def _ask(self, text: str, params: Mapping[str, Any]) -> Response:
        try:
            answer = self._http.post(self._route, json={"prompts": text, **params})
            _check(answer.status_code, answer.text)
            (found,) = answer.json()
            return Response(**found)
        except httpx.TransportError as error:
            raise self._gone(error) from error

    def _stream(
        self,
        text: str,
        streaming_fn: Callable[[list[Response]], object],
        params: Mapping[str, Any],
    ) -> None:
        body = {"prompts": text, "stream": True, **params}
        try:
            with self._http.stream("POST", self._route, json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    _check(answer.status_code, answer.read().decode())
                for line in answer.iter_lines():
                    data = line.removeprefix("data: ")
                    if data and data != "[DONE]":
                        streaming_fn([_piece(json.loads(data))])
        except httpx.TransportError as error:
            raise self._gone(error) from error

    @property
    def _route(self) -> str:
        return f"{self.url}/mii/{self.name}"

    def _gone(self, error: Exception) -> ConnectionError:
        return ConnectionError(
            f"deployment {self.name!r} does not answer at {self.url}: {error}; "
            "jaxgen.serve starts it anew"
        )


def client(name: str, *, api_key: str | None = None) -> Client:
    """The client of a deployment on this machine; DeploymentNotFound if there is none."""
    return Client(read_record(name), api_key=api_key)


def is_served(name: str, url: str) -> bool:
    """Whether a server of this name answers there, whatever key it wants for its other routes."""
    try:
        answer = httpx.get(f"{url}/status.json", timeout=10)
    except httpx.TransportError:
        return False
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return True  # a front whose replicas are all gone: it cannot say what they serve
    return answer.status_code == httpx.codes.OK and f'"{name}"' in answer.text


def _piece(value: Mapping[str, Any]) -> Response:
    if "error" in value:
        raise ConnectionError(value["error"]["message"])
    return Response(**value)


def _check(status: int, body: str) -> None:
    if status == httpx.codes.OK:
        return
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body[:500]
    if status < httpx.codes.INTERNAL_SERVER_ERROR:
        raise RefusedInput(message)
    raise ConnectionError(f"status {status}: {message}")
