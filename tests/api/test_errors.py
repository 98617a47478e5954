"""Every refusal and end of the engine has its status, type and code."""

from __future__ import annotations

import pytest

from lucevisor.api.errors import ApiError, bad_parameter, from_request_error, from_submit_error, internal_error
from lucevisor.engine.request import ContextOverflow, InvalidRequest, NotReady, QueueFull, RequestError, SubmitError


@pytest.mark.parametrize(
    ("error", "status", "code", "param", "retry"),
    [
        (QueueFull(8, 2, 16, 7), 429, "queue_full", None, "7"),
        (NotReady("group left is away"), 503, "not_ready", None, "5"),
        (ContextOverflow(9, 8, 64), 400, "context_length_exceeded", "messages", None),
        (InvalidRequest("prompt", "is empty"), 400, "invalid_request", "messages", None),
        (InvalidRequest("max_tokens", "is 0"), 400, "invalid_request", "max_tokens", None),
        (SubmitError("odd"), 500, "refused", None, None),
    ],
)
def test_refusals(error, status, code, param, retry):
    told = from_submit_error(error, "messages", 5)
    assert (told.status, told.code, told.param, told.headers.get("Retry-After")) == (status, code, param, retry)
    assert error.message in told.message


@pytest.mark.parametrize(("code", "status"), [("shard_lost", 503), ("shutting_down", 503), ("protocol_error", 500)])
def test_ends_of_running_requests(code, status):
    told = from_request_error(RequestError(code, "why"), 3)
    assert (told.status, told.code, told.message, told.type) == (status, code, "why", "server_error")
    assert told.headers == ({"Retry-After": "3"} if status == 503 else {})


def test_the_body_is_openais():
    error = bad_parameter("top_p", "2 is more than 1")
    assert error.body() == {
        "error": {
            "message": "top_p: 2 is more than 1",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "invalid_value",
        }
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "invalid_request_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_types(status, kind):
    assert ApiError(status, "x").type == kind


def test_a_defect_is_told_by_its_request_id_only():
    assert "req-1" in internal_error("req-1").message
