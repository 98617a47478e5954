"""The daemon's second thread: it never holds up the first, whatever the supervisor does."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from daemons import heartbeat
from daemons.heartbeat import N_WAITING, Reporter
from lucevisor.app import logs
from lucevisor.protocol.messages import Heartbeat, LogLine, Role, StreamKind
from lucevisor.protocol.transport import BlockingLink
from lucevisor.supervision.daemon import without_reserved_names
from lucevisor.supervision.events import State
from tests.supervision.real_groups import ready_group
from tests.waiting import until


@pytest.fixture
def ends():
    """A reporter that is not started, the supervisor's end, and an event that tells that the heartbeat was lost."""
    near, far = socket.socketpair()
    lost = threading.Event()
    supervisor = BlockingLink(far, role=Role.SUPERVISOR, stream=StreamKind.HEARTBEAT)
    link = BlockingLink(near, stream=StreamKind.HEARTBEAT)
    reporter = Reporter(link, lost.set)
    yield reporter, supervisor, lost
    supervisor.close()
    reporter.close()
    link.close()


def receive(supervisor, kind, n):
    """The next `n` messages of a kind; others are skipped."""
    found = []
    while len(found) < n:
        frame = supervisor.receive()
        assert frame is not None
        if isinstance(frame.message, kind):
            found.append(frame.message)
    return found


def test_a_change_of_phase_is_told_at_once_but_steps_are_not(ends, monkeypatch):
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 3600.0)
    reporter, supervisor, _ = ends
    reporter.start()
    receive(supervisor, Heartbeat, 1)
    reporter.phase("load")
    assert receive(supervisor, Heartbeat, 1)[0].phase == "load"
    reporter.phase("idle")
    assert receive(supervisor, Heartbeat, 1)[0].phase == "idle"
    for step in range(1000):
        reporter.phase("step", step)
        reporter.step_done(3)
        reporter.phase("idle")
    reporter.phase("load")
    beat = receive(supervisor, Heartbeat, 1)[0]
    assert (beat.count, beat.phase, beat.n_steps, beat.n_tokens) == (3, "load", 1000, 3000)


def test_a_supervisor_that_does_not_read_costs_bounded_memory_and_no_time(ends):
    reporter, supervisor, lost = ends
    reporter.start()
    time.sleep(0.05)
    began = time.monotonic()
    for i in range(20 * N_WAITING):
        reporter.log("info", "x" * 200, i=i)
    assert time.monotonic() - began < 20.0
    assert len(reporter._waiting) <= N_WAITING
    received = dropped = 0
    while received + dropped < 20 * N_WAITING:
        line = receive(supervisor, LogLine, 1)[0]
        dropped += line.fields.get("n_dropped", 0)
        received += "i" in line.fields
    assert received + dropped == 20 * N_WAITING
    assert dropped > 0
    assert not lost.is_set()


def test_a_closed_heartbeat_is_told_and_what_is_said_later_is_no_error(ends):
    reporter, supervisor, lost = ends
    reporter.start()
    receive(supervisor, Heartbeat, 1)
    supervisor.close()
    assert lost.wait(20.0)
    reporter.log("info", "nobody hears")
    reporter.close()


def test_without_descriptors_the_heart_beats_on(ends):
    reporter, supervisor, _ = ends
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        reporter.start()
        assert [beat.rss_bytes for beat in receive(supervisor, Heartbeat, 2)] == [0, 0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- log records


NAMES = (
    "self", "event", "event_kw", "method_name", "level", "log_level", "timestamp", "logger", "logger_name", "name",
    "exc_info", "exception", "stack", "stack_info", "group", "pid", "args", "kw", "positional_args", "_record",
    "_from_structlog", "_name", "daemon_self", "", "a b", "ünï",
)  # fmt: skip


async def test_a_record_with_any_field_name_is_logged_whole_and_the_daemon_lives(tmp_path, capsys):
    logs.configure("json", "info")
    try:
        fields = {name: f"value {i}" for i, name in enumerate(NAMES)}
        async with ready_group(tmp_path, "odd log", TINY_FIELDS=json.dumps(fields)) as (group, _):
            records = []

            def arrived() -> bool:
                lines = capsys.readouterr().err.splitlines()
                records.extend(record for record in map(json.loads, lines) if record["event"] == "odd")
                return bool(records)

            await until(lambda: arrived() or group.state is not State.READY)
            assert group.state is State.READY
            [record] = records
            assert (record["group"], record["pid"], record["level"]) == ("left", group.pid, "info")
            assert set(record.values()) >= set(fields.values())
            assert record["daemon_self"] == fields["daemon_self"]
            assert record["daemon_daemon_self"] == fields["self"]
    finally:
        structlog.reset_defaults()


@given(st.dictionaries(st.text(max_size=12) | st.sampled_from(NAMES), st.integers()))
def test_no_field_is_lost_and_plain_names_stay(fields):
    named = without_reserved_names(fields)
    assert sorted(named.values()) == sorted(fields.values())
    assert not set(named) & {"self", "event", "level", "timestamp", "exc_info", "stack_info", "group", "pid"}
    assert all(named[key] == value for key, value in fields.items() if key in ("tensor", "n_bytes"))
