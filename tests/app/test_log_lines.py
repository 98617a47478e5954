"""Which lines of the log are wanted, and how they read on a terminal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.app.log_reader import LogQuery, wanted
from lucevisor.app.logs import ConsoleLine, short_request

REQUEST = {
    "method": "POST", "path": "/v1/chat/completions", "status": 200, "duration_s": 4.123456, "prompt_tokens": 19,
    "cached_tokens": 0, "generated_tokens": 127, "accepted_tokens": 0, "rejected_tokens": 0, "queue_s": 0.0,
    "first_token_s": 0.1, "request_id": "req-1", "event": "request", "level": "info",
    "timestamp": "2026-11-22T22:04:31.933000Z",
}  # fmt: skip


def test_a_request_is_one_short_line():
    assert short_request(dict(REQUEST))["event"] == "POST /v1/chat/completions 200 4.1s 19→127 tok 31 tok/s"
    refused = {"method": "POST", "path": "/v1/chat/completions", "status": 400, "duration_s": 0.0012, "error": "n: 0"}
    assert short_request(refused) == {"event": "POST /v1/chat/completions 400 1ms", "error": "n: 0"}
    line = ConsoleLine(colors=False).line(json.dumps(REQUEST | {"accepted_tokens": 9}))
    assert "POST /v1/chat/completions 200 4.1s 19→127 tok 31 tok/s" in line
    assert "accepted_tokens=9" in line
    assert "request_id=req-1" in line
    assert "queue_s" not in line
    assert ":04:31.933" in line  # of this machine's hour
    assert "2026" not in line


def test_a_state_is_a_sentence():
    record = {"event": "group state", "level": "info", "timestamp": "2026-11-22T22:04:31.933000Z", "group": "left"}
    line = ConsoleLine(colors=False).line(json.dumps(record | {"state": "loading", "reason": "hello", "pid": 7}))
    assert line.endswith("] group left is loading: hello pid=7")
    line = ConsoleLine(colors=False).line(json.dumps(record | {"state": "stopped", "reason": "", "pid": None}))
    assert line.rstrip().endswith("] group left is stopped")


@pytest.mark.parametrize("line", ["not json", "3", '{"event": "x"}', '{"event": "request", "path": null}', "{"])
def test_other_lines_are_shown_as_well(line):
    assert ConsoleLine(colors=False).line(line + "\n")


@given(st.dictionaries(st.sampled_from(sorted(REQUEST)), st.none() | st.integers(0, 9) | st.text(max_size=5)))
def test_any_record_is_rendered(changes):
    record = {**REQUEST, **{k: v for k, v in changes.items() if not isinstance(REQUEST[k], int | float)}}
    assert ConsoleLine(colors=True).line(json.dumps(record))


@pytest.mark.parametrize(
    ("query", "is_wanted"),
    [
        (LogQuery(), True),
        (LogQuery(group="left"), True),
        (LogQuery(group="right"), False),
        (LogQuery(level="warning"), True),
        (LogQuery(level="error"), False),
        (LogQuery(since_s=1_795_385_000.0), True),
        (LogQuery(since_s=1_795_400_000.0), False),
    ],
)
def test_group_level_and_time(query, is_wanted):
    record = {"group": "left", "level": "warning", "timestamp": "2026-11-22T22:04:31Z", "event": '"group": "right"'}
    assert wanted(json.dumps(record), query) is is_wanted


def test_a_line_that_is_no_record_is_wanted_only_when_all_are():
    assert wanted("half a li", LogQuery())
    assert not wanted("half a li", LogQuery(level="info"))
