"""Errors as clients see them: status, type, code and parameter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from lucevisor.engine.request import (
    ContextOverflow,
    InvalidRequest,
    NotReady,
    QueueFull,
    RequestError,
    SubmitError,
)

CLIENT_CLOSED = 499
"""Status, in logs and metrics, of a request whose client disconnected; never sent."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {**_TYPES, 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


class ApiError(Exception):
    """An error response.  `param` is the parameter as the client wrote it; `headers` are added to the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error, to bring it from a worker."""
        make = partial(ApiError, code=self.code, param=self.param, headers=self.headers)
        return make, (self.status, self.message)

    @property
    def type(self) -> str:
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def renamed(self, param: str) -> ApiError:
        if not self.param:
            return self
        message = self.message
        if message.startswith(self.param):
            message = param + message[len(self.param) :]
        return ApiError(self.status, message, code=self.code, param=param, headers=self.headers)

    def ollama_body(self) -> dict[str, object]:
        """Return Ollama's error body; in a stream it is the last line."""
        return {"error": self.message}

    def anthropic_body(self, request_id: str | None = None) -> dict[str, object]:
        """Return Anthropic's error body; in a stream it is the data of the last event."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        message = self.message
        if self.code == "context_length_exceeded":  # agents look for these words, and shorten the conversation
            message = f"prompt is too long: {message}"
        error: dict[str, object] = {"type": kind, "message": message}
        if self.param == "thread":  # after this error Anthropic's clients send all messages themselves
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        body: dict[str, object] = {"type": "error", "error": error}
        return body if request_id is None else {**body, "request_id": request_id}


def bad_parameter(param: str, why: str, code: str = "invalid_value") -> ApiError:
    """Return a 400 for one parameter; its message starts with the name."""
    return ApiError(400, f"{param}: {why}", code=code, param=param)


def internal_error(request_id: str) -> ApiError:
    return ApiError(
        500, f"an internal error occurred; see request id {request_id} in the server's log", code="internal_error"
    )


def unavailable(reason: str, retry_after_s: int, code: str = "not_ready") -> ApiError:
    """Return a 503 with the reason and Retry-After in seconds."""
    return ApiError(503, reason, code=code, headers={"Retry-After": str(retry_after_s)})


def from_submit_error(error: SubmitError, prompt_param: str, retry_after_s: int) -> ApiError:
    """Translate an error of `submit`; `prompt_param` is the parameter that held the prompt."""
    if isinstance(error, QueueFull):
        return ApiError(429, error.message, code=error.code, headers={"Retry-After": str(error.retry_after_s)})
    if isinstance(error, ContextOverflow):
        return ApiError(400, error.message, code=error.code, param=prompt_param)
    if isinstance(error, InvalidRequest):
        param = prompt_param if error.parameter == "prompt" else error.parameter
        return ApiError(400, error.message, code=error.code, param=param)
    if isinstance(error, NotReady):
        return unavailable(error.message, retry_after_s, error.code)
    return ApiError(500, error.message, code=error.code)


def from_request_error(error: RequestError, retry_after_s: int) -> ApiError:
    """Translate the failure of a running request: 503 if a retry can succeed, 400 for its grammar, else 500."""
    if error.code in ("shard_lost", "shutting_down", "host_memory_full"):
        return unavailable(error.message, retry_after_s, error.code)
    return ApiError(400 if error.code == "constraint_failed" else 500, error.message, code=error.code)
