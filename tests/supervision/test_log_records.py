"""Log records of daemons in the supervisor's log: any field name, one line, nothing lost."""

from __future__ import annotations

import json

import structlog
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.app import logs
from lucevisor.supervision.daemon import without_reserved_names
from lucevisor.supervision.states import State
from tests.supervision.real_groups import ready, tiny_group, until

NAMES = (
    "self", "event", "event_kw", "method_name", "level", "log_level", "timestamp", "logger", "logger_name", "name",
    "exc_info", "exception", "stack", "stack_info", "group", "pid", "args", "kw", "positional_args", "_record",
    "_from_structlog", "_name", "daemon_self", "", "a b", "ünï",
)  # fmt: skip


async def test_a_record_with_any_field_name_is_logged_whole_and_the_daemon_lives(tmp_path, capsys):
    logs.configure("json", "info")
    try:
        fields = {name: f"value {i}" for i, name in enumerate(NAMES)}
        async with tiny_group(tmp_path, "odd log", TINY_FIELDS=json.dumps(fields)) as (group, _):
            await group.start()
            await ready(group)
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
