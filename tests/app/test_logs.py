"""Log records under full disks, readers that do not read, rotation and exits."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.app import logs
from lucevisor.app.logs import ConsoleLine, short_request
from lucevisor.cli.logs import LogQuery, LogReader, matches_query
from tests.waiting import wait_until

log = structlog.get_logger("t")


PATIENT = "logs.CLOSING_S = 100.0\n"
"""For writers that do not hang: a busy machine may give them no second."""


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setattr(logs, "CLOSING_S", 100.0)
    yield
    logs.close()
    structlog.reset_defaults()
    logging.getLogger().setLevel(logging.WARNING)


def read(directory: Path) -> list[dict]:
    """All records, oldest first; every line must be whole."""
    paths = [directory / f"{logs.FILE}.{n}" for n in range(logs.N_OLD_FILES, 0, -1)] + [directory / logs.FILE]
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().split("\n")[:-1]]


class TestRecords:
    def test_ours_and_those_of_libraries_become_json_lines(self, tmp_path):
        logs.configure("json", "info", tmp_path, to_terminal=False)
        log.info("one", group="left", odd="\ud800\u2028")
        log.debug("not this")
        try:
            raise ZeroDivisionError("a cause")
        except ZeroDivisionError:
            log.exception("two")
            logging.getLogger("aiohttp.server").exception("three %s", "arguments")
        logging.getLogger("aiohttp.access").info("not this")
        logs.close()
        one, two, three = read(tmp_path)
        assert (one["event"], one["group"], one["level"]) == ("one", "left", "info")
        assert one["timestamp"].endswith("Z")
        assert (two["event"], two["level"]) == ("two", "error")
        assert "ZeroDivisionError: a cause" in two["exception"]
        assert three["event"].startswith("three arguments\nTraceback")
        assert (three["level"], three["logger"]) == ("error", "aiohttp.server")
        assert three["timestamp"] >= two["timestamp"][:19]

    def test_a_record_that_cannot_be_rendered_harms_no_other(self, tmp_path):
        class Odd:
            def __structlog__(self):
                raise RuntimeError("no")

        logs.configure("json", "info", tmp_path, to_terminal=False)
        before = logs.dropped_records()["file"]
        log.info("odd", value=Odd())
        log.info("next")
        logs.close()
        assert logs.dropped_records()["file"] == before + 1
        assert [record["event"] for record in read(tmp_path)] == ["log records dropped", "next"]


class TestFullDisk:
    def test_records_are_dropped_and_counted_and_writing_goes_on_when_there_is_room(self, tmp_path, small_disk):
        directory = small_disk(64)
        logs.configure("json", "info", directory, to_terminal=False)
        before = logs.dropped_records()["file"]
        log.info("before")
        filler = directory / "filler"
        wait_until(lambda: len(read(directory)) == 1)
        fill(filler)
        for i in range(200):
            log.info("lost or not", i=i, text="x" * 200)  # some fit into the rest of the last page
        # with the first record: none is on its way any more
        wait_until(lambda: logs.dropped_records()["file"] - before + len(read(directory)) == 201)
        n_dropped = logs.dropped_records()["file"] - before
        assert n_dropped > 150
        filler.unlink()
        log.info("after")
        logs.close()
        records = read(directory)  # whole lines only
        assert [record["event"] for record in (records[0], *records[-2:])] == ["before", "log records dropped", "after"]
        assert records[-2]["records"] == n_dropped == logs.dropped_records()["file"] - before
        assert records[-2]["reason"] == "No space left on device"
        assert len(records) + n_dropped == 1 + 200 + 2


SCRIPT = """
import sys, structlog, pathlib, time
from lucevisor.app import logs
logs.configure("json", "info", pathlib.Path(sys.argv[1]) if sys.argv[1] else None, to_terminal=True)
log = structlog.get_logger("t")
"""


def script(text: str, directory: str = "", **more) -> subprocess.Popen:
    command = [sys.executable, "-c", SCRIPT + text, directory]
    return subprocess.Popen(command, text=True, **more)


def test_a_disk_that_hangs_stops_nobody(tmp_path):
    """A pipe that nobody reads stands for the disk: writes block for ever."""
    text = f"""
import os
for fd in os.listdir("/proc/self/fd"):
    if os.path.realpath("/proc/self/fd/" + fd) == str(logs.log_file().resolve()):
        os.dup2(os.pipe()[1], int(fd))
for i in range({logs.N_QUEUED + 2000}): log.info("much", i=i, text="x" * 100)
logs.close()
print(logs.dropped_records()["file"])
"""
    process = script(text, str(tmp_path), stderr=subprocess.DEVNULL, stdout=subprocess.PIPE)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert 0 < int(said) <= 2000


class TestStandardError:
    @pytest.mark.parametrize("end", ["", "sys.exit(1)", "try: raise RuntimeError('crashed')\nfinally: logs.close()"])
    def test_everything_is_written_on_every_exit(self, end):
        process = script(f"{PATIENT}for i in range(1000): log.info('line', i=i)\n{end}", stderr=subprocess.PIPE)
        _, said = process.communicate(timeout=100)
        lines = said.splitlines()
        assert [json.loads(line)["i"] for line in lines if line.startswith("{")] == list(range(1000))
        assert ("RuntimeError: crashed" in said) == ("crashed" in end)

    def test_a_pipe_nobody_reads_stops_neither_the_file_nor_the_exit(self, tmp_path):
        text = "for i in range(4000): log.info('line', i=i, text='x' * 100)\nlogs.print_line('a line')\n"
        text += "while sum(1 for _ in logs.log_file().open()) < 4000: time.sleep(0.01)\n"
        text += "logs.close()\nprint('done')"
        process = script(text, str(tmp_path), stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout.readline() == "done\n"
        assert process.wait(timeout=100) == 0
        assert [record["i"] for record in read(tmp_path)] == list(range(4000))
        process.stderr.close()
        process.stdout.close()

    def test_a_reader_that_went_away_and_a_full_device(self, tmp_path):
        text = f"{PATIENT}for i in range(100): log.info('line', i=i)\nlogs.close()\nprint(logs.dropped_records())"
        with open("/dev/full", "w") as full:
            done = script(text, str(tmp_path), stderr=full, stdout=subprocess.PIPE)
            said, _ = done.communicate(timeout=100)
        assert said == "{'file': 0, 'stderr': 100}\n"
        assert len(read(tmp_path)) == 100

    def test_lines_of_the_display_keep_their_place(self):
        text = f"{PATIENT}log.info('one')\nlogs.print_line('plain: two')\nlog.info('three')"
        _, said = script(text, stderr=subprocess.PIPE).communicate(timeout=100)
        one, two, three = said.splitlines()
        assert (json.loads(one)["event"], two, json.loads(three)["event"]) == ("one", "plain: two", "three")


class TestRotation:
    def test_files_stay_small_and_few(self, tmp_path, monkeypatch):
        monkeypatch.setattr(logs, "FILE_BYTES", 4096)
        logs.configure("json", "info", tmp_path, to_terminal=False)
        for i in range(500):
            log.info("line", i=i)
        logs.close()
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [logs.FILE, *(f"{logs.FILE}.{n}" for n in range(1, logs.N_OLD_FILES + 1))]
        assert all(path.stat().st_size <= 4096 for path in tmp_path.iterdir())
        kept = [record["i"] for record in read(tmp_path)]
        assert kept == list(range(kept[0], 500))

    def test_a_removed_directory_is_made_again_and_costs_records_only_while_that_is_impossible(self, tmp_path):
        directory = tmp_path / "log"
        logs.configure("json", "info", directory, to_terminal=False)
        log.info("one")
        wait_until(lambda: read(directory))
        shutil.rmtree(directory)
        log.info("two")
        wait_until(lambda: read(directory))
        shutil.rmtree(directory)
        directory.write_text("in the way")
        n_before = logs.dropped_records()["file"]
        log.info("three")
        wait_until(lambda: logs.dropped_records()["file"] > n_before)
        directory.unlink()
        log.info("four")
        logs.close()
        assert [record["event"] for record in read(directory)] == ["log records dropped", "four"]

    def test_a_reader_follows_and_misses_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr(logs, "FILE_BYTES", 4096)
        logs.configure("json", "info", tmp_path, to_terminal=False)
        reader = LogReader(tmp_path / logs.FILE)
        seen: list[int] = []
        assert reader.lines() == []
        for i in range(600):
            log.info("line", i=i, text="\u2028 \x0b" + "é" * (i % 50))
            if i % 20 == 19:
                while len(seen) <= i:
                    seen += [json.loads(line)["i"] for line in reader.lines()]
        reader.close()
        assert seen == list(range(600))

    def test_a_reader_begins_with_the_oldest_file_and_takes_whole_lines_only(self, tmp_path):
        for n, text in ((2, "a\n"), (1, "b\nc\n"), (0, "d\nhal")):
            (tmp_path / (f"f.{n}" if n else "f")).write_text(text)
        reader = LogReader(tmp_path / "f")
        seen = []
        while lines := reader.lines():
            seen += lines
        assert seen == ["a\n", "b\n", "c\n", "d\n"]
        (tmp_path / "f").write_text("d\nother\n")  # the writer took the half line back
        assert reader.lines() == ["other\n"]
        assert reader.lines() == []
        reader.close()


def fill(path: Path) -> None:
    """Take the last byte of a file system."""
    with open(path, "wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                size //= 2


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
    assert datetime(2026, 11, 22, 22, 4, 31, tzinfo=UTC).astimezone().strftime("%H:%M:%S.933") in line
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
    assert matches_query(json.dumps(record), query) is is_wanted


def test_a_line_that_is_no_record_is_wanted_only_when_all_are():
    assert matches_query("half a li", LogQuery())
    assert not matches_query("half a li", LogQuery(level="info"))
