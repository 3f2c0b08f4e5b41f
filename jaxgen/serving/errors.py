"""Errors as OpenAI's clients read them: an object `error` with message, type, param and code."""

import json
from typing import Any

from starlette.responses import Response

from jaxgen.sampling import InvalidParameter
from jaxgen.schedule.verdict import SchedulingError, SchedulingResult
from jaxgen.serving.async_engine import EngineDead
from jaxgen_checkpoints.errors import RefusedInput

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_LATER = (
    SchedulingResult.EngineSequenceLimitExceeded,
    SchedulingResult.QueueLimitExceeded,
)
_DEAD = "the engine stopped while this request was running"
_IN_PLACE_OF_TEXT = "the server failed; its log has the reason under this request's id"


class ApiError(Exception):
    """What ends a request: an HTTP status and the body that explains it.

    param: the request's field that is at fault. headers: sent beside the body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object of the response, or of the event in a stream that had begun."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "APIError"),
                "param": self.param,
                "code": self.status,
            }
        }

    def response(self) -> Response:
        """The whole HTTP response."""
        return Response(
            json.dumps(self.body()),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the request itself is at fault."""
    return ApiError(400, message, param=param)


def unavailable(message: str, retry_after: int = 1) -> ApiError:
    """503: the same request may succeed after so many seconds."""
    return ApiError(503, message, headers={"Retry-After": str(retry_after)})


def as_api_error(error: Exception) -> ApiError:
    """How a client is told of any exception; what is not its fault is told without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidParameter):
        return bad_request(str(error), error.param)
    if isinstance(error, SchedulingError):
        return unavailable(str(error)) if error.result in _LATER else bad_request(str(error))
    if isinstance(error, RefusedInput):
        return bad_request(str(error))
    return ApiError(500, _DEAD if isinstance(error, EngineDead) else _IN_PLACE_OF_TEXT)
