"""What all routes share: the engine, the settings, who is being served, and the metrics."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxgen.serving.errors import ApiError, unavailable
from jaxgen.serving.logprobs import TokenNames
from jaxgen.serving.metrics import Metrics
from jaxgen.serving.settings import ServerSettings
from jaxgen.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxgen.serving.async_engine import AsyncEngine


class Serving:
    """One server's state; belongs to its event loop.

    Attributes: engine, settings, metrics, names (of the model, the first in answers), longest_token
    (characters of the vocabulary's longest), active (continuations being served), ready (every step
    is compiled), preparing (that is under way), draining (nothing new is taken), failure (why the
    engine never came up).
    """

    def __init__(self, engine: "AsyncEngine", settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.names: tuple[str, ...] = settings.served_model_names or (engine.model_name,)
        self.metrics = Metrics(engine, self.names[0], settings.metrics_prefix)
        engine.add_listener(self.metrics.finished)
        self.longest_token = _longest_token(engine.tokenizer)
        self.active = 0
        self.ready = False
        self.preparing = False
        self.draining = False
        self.failure: Exception | None = None
        self._engine_ids: dict[str, set[str]] = {}

    def check_model(self, name: str | None) -> str:
        """The name to answer with; ApiError 404 for a model that is not served."""
        if name is None or name in self.names:
            return name or self.names[0]
        served = ", ".join(self.names)
        message = f"the model {name!r} does not exist; served here: {served}"
        raise ApiError(404, message, param="model")

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; ApiError 400 where the model has none."""
        if self.engine.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: send the prompt as token ids")
        return self.engine.tokenizer

    def token_names(self, *, as_ids: bool | None) -> TokenNames:
        """How tokens are named beside their logprobs. as_ids: whether the request wants ids."""
        by_id = as_ids or self.settings.return_tokens_as_token_ids
        return TokenNames(self.engine.tokenizer, as_ids=bool(by_id))

    def whats_wrong(self) -> str | None:
        """Why nothing can be generated; None while all is well."""
        if self.failure is not None:
            return f"the engine could not be started: {self.failure}"
        if not self.ready:
            return "the model is being loaded and compiled"
        if not self.engine.healthy:
            return f"the engine has stopped: {self.engine.error}"
        return None

    def need_engine(self) -> None:
        """ApiError 503 while nothing can be generated."""
        wrong = self.whats_wrong()
        if wrong is not None:
            raise unavailable(wrong, self.settings.retry_after_seconds)

    @contextmanager
    def admitted(self, public_id: str, engine_ids: list[str], choices: int) -> Generator[None]:
        """While the block runs, the request counts, and can be aborted by its public id.

        ApiError 503 if the server is not ready, stops, or has as many waiting as it may.
        """
        settings = self.settings
        self.need_engine()
        if self.draining:
            raise unavailable("the server is stopping", settings.retry_after_seconds)
        queued = self.active - self.engine.stats().running
        if self.active and queued + choices > settings.max_queued_requests:
            self.metrics.rejected()
            raise unavailable(
                f"{queued} requests are waiting, at most {settings.max_queued_requests} may: "
                "come back later",
                settings.retry_after_seconds,
            )
        self.active += choices
        self._engine_ids.setdefault(public_id, set()).update(engine_ids)
        try:
            yield
        finally:
            self.active -= choices
            left = self._engine_ids[public_id]
            left.difference_update(engine_ids)
            if not left:
                del self._engine_ids[public_id]

    async def abort(self, public_id: str | None) -> None:
        """Ends one request, or all for None. Unknown ids are fine."""
        if public_id is None:
            await self.engine.abort(None)
            return
        for engine_id in list(self._engine_ids.get(public_id, ())):
            await self.engine.abort(engine_id)


def _longest_token(tokenizer: Tokenizer | None) -> int:
    """Characters that the longest vocabulary entry can stand for, at least 16."""
    if tokenizer is None:
        return 16
    return max([16, *(len(tokenizer.token_bytes(token)) for token in range(tokenizer.size))])
