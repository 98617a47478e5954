"""The admin socket: cache routes over a real store, on a real Unix socket."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from lucevisor.app.admin import CacheOperations, create_admin_app, serve_admin
from lucevisor.cli import cli
from lucevisor.config.sections import CacheConfig
from lucevisor.errors import LucevisorError
from lucevisor.snapshots.file_format import Fault
from lucevisor.snapshots.store import FAILED_SAVES, NOT_RESTORED, SnapshotRefused
from tests.another_user import connect_as_nobody, needs_root, open_directory
from tests.api.scripted_model import Rig
from tests.snapshots.snapshot_parts import made_model, made_slot, made_store, names, restore, save


class Desk:
    """A supervisor's cache behind its socket.  ``service`` has what CacheOperations reads of a Service."""

    waited: tuple[float, ...] = ()
    shown: dict[str, object] = {}  # noqa: RUF012  # a test sets its own

    async def wait_ready(self, timeout_s):
        self.waited += (timeout_s,)
        return True

    def status(self):
        return self.shown

    def __init__(self, directory, disk_bytes=1 << 24):
        self.store = made_store(directory, disk_bytes=disk_bytes)
        self.service = SimpleNamespace(
            only=SimpleNamespace(engine=None, snapshot_store=self.store),
            models=["demo"],
            state="ready",
            config=SimpleNamespace(cache=CacheConfig(dir=str(directory)), file="c.toml"),
        )
        self.cache = CacheOperations(self.service)

    async def ask(self, method, path, body=None, **more):
        if body is not None:
            more["json"] = body
        async with self.session.request(method, f"http://admin{path}", **more) as response:
            return response.status, await response.json()


@pytest.fixture
async def desk(tmp_path):
    desk = Desk(tmp_path / "files")
    runner = await serve_admin(create_admin_app(desk), tmp_path / "s")
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "s"))) as desk.session:
        with capture_logs():  # a command's output is caught for the whole process
            yield desk
    await runner.cleanup()
    desk.store.close()


def damage(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


async def test_cache_shows_files_and_slots(desk):
    old, new = (save(desk.store, made_slot(n)) for n in (40, 50))
    status, told = await desk.ask("GET", "/cache")
    assert (status, told["slots"], told["disk"]) == (200, [], 1 << 24)
    assert told["dir"] == str(desk.store.directory)
    facts = {one["file"]: one for one in told["files"]}
    assert set(facts) == {old.file, new.file}
    assert facts[old.file]["n_tokens"] == 40
    assert facts[old.file]["state"] == "snapshot"
    assert facts[new.file]["n_bytes"] == new.n_bytes


async def test_verify_says_what_is_damaged_and_the_store_forgets_what_is_set_aside(desk):
    good, bad = (save(desk.store, made_slot(n)) for n in (40, 50))
    damage(desk.store.directory / bad.file)
    status, told = await desk.ask("POST", "/cache/verify")
    problems = {one["file"]: one["problem"] for one in told["checked"]}
    assert status == 200
    assert problems[good.file] == ""
    assert problems[bad.file].startswith("tensor layers.2.v")
    assert len(desk.store.entries) == 2  # told, not touched
    _, told = await desk.ask("POST", "/cache/verify", {"files": [bad.file], "set_aside": True})
    assert [one["set_aside"] for one in told["checked"]] == [bad.file + ".refused"]
    assert [entry.file for entry in desk.store.entries] == [good.file]
    assert restore(desk.store, good)
    status, told = await desk.ask("POST", "/cache/verify", {"files": [bad.file]})
    assert (status, bad.file in told["error"]) == (409, True)


async def test_prune_goes_by_the_budget_or_by_what_is_said(desk):
    old, new = (save(desk.store, made_slot(n)) for n in (40, 50))
    os.utime(desk.store.directory / old.file, (1000, 1000))
    assert await desk.ask("POST", "/cache/prune") == (200, {"removed": []})
    status, told = await desk.ask("POST", "/cache/prune", {"to": new.n_bytes})
    assert (status, [one["file"] for one in told["removed"]]) == (200, [old.file])
    assert [entry.file for entry in desk.store.entries] == [new.file]
    await desk.ask("POST", "/cache/prune", {"to": 0})
    assert desk.store.entries == []
    assert names(desk.store.directory) == []


async def test_rm_of_files_and_of_all_leaves_strangers(desk):
    directory = desk.store.directory
    first, second = (save(desk.store, made_slot(n)) for n in (40, 50))
    other = made_store(directory, made_model("Other", "cd"))
    save(other, made_slot(40))
    other.close()
    (directory / "notes.txt").write_text("mine")
    status, told = await desk.ask("POST", "/cache/rm", {"files": [first.file, "notes.txt"]})
    assert (status, "not lucevisor's to remove" in told["error"]) == (409, True)
    assert len(names(directory)) == 4
    status, told = await desk.ask("POST", "/cache/rm", {"files": [first.file]})
    assert (status, [one["n_bytes"] for one in told["removed"]]) == (200, [first.n_bytes])
    assert [entry.file for entry in desk.store.entries] == [second.file]
    _, told = await desk.ask("POST", "/cache/rm", {"all": True})
    assert len(told["removed"]) == 2
    assert names(directory) == ["notes.txt"]
    assert desk.store.entries == []


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("rm", b"", "name files"),
        ("rm", b'{"files": ["a"], "all": true}', "name files"),
        ("prune", b'{"to": -1}', "$.to"),
        ("prune", b'{"too": 1}', "too"),
        ("verify", b'{"files": "a"}', "$.files"),
        ("verify", b"{", "truncated"),
    ],
)
async def test_orders_that_make_no_sense_are_refused(desk, path, body, text):
    status, told = await desk.ask("POST", f"/cache/{path}", data=body)
    assert (status, text in told["error"]) == (400, True), told


@pytest.mark.parametrize("sent", ["nan", "inf", "-inf", "-1", "1e999", "86401", "", "1s", "x" * 5000, "%00", "%ff"])
async def test_a_wait_that_is_no_number_of_seconds_is_refused_by_name(desk, sent):
    status, told = await desk.ask("GET", f"/ready?timeout_s={sent}")
    assert (status, told["error"].startswith("timeout_s: ")) == (400, True)
    assert desk.waited == ()


async def test_waits_that_are(desk):
    for sent in ("", "?timeout_s=0", "?timeout_s=1e3", "?timeout_s=86400"):
        assert await desk.ask("GET", f"/ready{sent}") == (200, {"ready": True})
    assert desk.waited == (0.0, 0.0, 1000.0, 86400.0)


@pytest.mark.parametrize("path", ["/restart", "/cache/rm"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"groups": ["\xed"]}',
        b"[" * 100_000,
        b'{"groups": ' + b"[" * 100_000,
        b'{"to": 1e999}',
        b'{"to": 1' + b"0" * 5000 + b"}",
        b'{"groups": [' + b'"a",' * 10_000 + b'"a"]}',
        b'{"x' + b"x" * 100_000 + b'": 1}',
    ],
    ids=["utf-8", "nested", "nested groups", "overflow", "digits", "many", "long"],
)
async def test_orders_that_cannot_be_read_are_400(desk, path, body):
    status, told = await desk.ask("POST", path, data=body)
    assert status == 400
    assert len(told["error"]) < 400


async def test_refusals_of_the_server_itself_are_json_too(desk):
    assert (await desk.ask("POST", "/cache/rm", data=io.BytesIO(b"{" + b" " * (1 << 20))))[0] == 413
    assert (await desk.ask("GET", "/nothing"))[0] == 404
    assert (await desk.ask("GET", "/stop"))[0] == 405
    status, told = await desk.ask("POST", "/cache/rm", data=b"{}", headers={"Content-Encoding": "gzip"})
    assert (status, told["error"]) == (415, "send the body without Content-Encoding")


async def test_figures_that_are_not_finite_are_null(desk):
    desk.shown = {"a": float("nan"), "b": [float("inf"), 1.5, (-float("inf"),)]}
    async with desk.session.get("http://admin/status") as response:
        assert json.loads(await response.text(), parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5, [None]]}


async def test_a_path_need_not_be_utf8(desk):
    desk.shown = {"file": "caf\u00e9\udcff"}
    async with desk.session.get("http://admin/status") as response:
        assert json.loads(await response.text()) == desk.shown


async def test_a_defect_is_told_and_logged(desk):
    desk.service.only.snapshot_store = object()
    status, told = await desk.ask("GET", "/cache")
    assert (status, told["error"].startswith("AttributeError: ")) == (500, True)


@pytest.mark.parametrize("sent", ["nan", "inf", "-1", "1e999", "soon"])
def test_commands_take_finite_seconds_only(sent):
    for arguments in (["stop", "--timeout", sent], ["start", "c.toml", "--timeout", sent]):
        result = CliRunner().invoke(cli, arguments)
        assert (result.exit_code, "--timeout" in result.output) == (2, True)


@pytest.mark.parametrize("path", ["verify", "prune", "rm"])
async def test_snapshots_that_are_off_or_closing_are_409(desk, path):
    body = {"all": True} if path == "rm" else {}
    desk.service.state = "draining"
    status, told = await desk.ask("POST", f"/cache/{path}", body)
    assert (status, "is stopping" in told["error"]) == (409, True)
    desk.service.state, desk.service.only.snapshot_store = "starting", None
    status, told = await desk.ask("POST", f"/cache/{path}", body)
    assert (status, "not open yet" in told["error"]) == (409, True)
    desk.service.config.cache = CacheConfig()
    status, told = await desk.ask("POST", f"/cache/{path}", body)
    assert (status, "snapshots are off: cache.dir is not set in c.toml" in told["error"]) == (409, True)
    status, told = await desk.ask("GET", "/cache")
    assert (status, told["dir"], told["files"]) == (200, "", [])


def command(*arguments):
    """(exit code, output) of `lucevisor cache`; errors come as the exceptions that main() prints."""
    result = CliRunner().invoke(cli, ["cache", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


async def test_the_commands_print_the_same_for_a_directory_and_a_supervisor(desk, tmp_path):
    directory = desk.store.directory
    good, bad = (save(desk.store, made_slot(n)) for n in (40, 50))
    damage(directory / bad.file)

    async def both(*arguments):
        there = await asyncio.to_thread(command, *arguments, "--socket", tmp_path / "s")
        assert there == command(*arguments, "--dir", directory)
        return there

    assert json.loads((await both("ls", "--json"))[1])[0]["model"] == "Made 1B"
    assert "2 damaged" not in (await both("verify"))[1]
    code, output = await both("verify", good.file)
    assert (code, output) == (0, f"{good.file}: good\n1 checked, 0 damaged\n")
    assert (await both("prune", "--to", "1GiB"))[1] == "0 files removed, 0 B free\n"
    code, output = await asyncio.to_thread(command, "ls", "--socket", tmp_path / "s")
    assert output.splitlines()[-1].endswith(" of 16.0 MiB")
    assert output.splitlines()[:-1] == command("ls", "--dir", directory)[1].splitlines()[:-1]
    code, output = await asyncio.to_thread(command, "verify", "--set-aside", "--socket", tmp_path / "s")
    assert (code, f"set aside as {bad.file}.refused" in output) == (1, True)
    code, output = await asyncio.to_thread(command, "prune", "--refused", "--socket", tmp_path / "s")
    assert (code, output.startswith(f"removed {bad.file}.refused, ")) == (0, True)
    code, output = await asyncio.to_thread(command, "rm", "--all", "--socket", tmp_path / "s")
    assert (code, output.startswith(f"removed {good.file}, ")) == (0, True)
    desk.service.only.snapshot_store, desk.service.config.cache = None, CacheConfig()
    assert "cache.dir is not in use" in (await asyncio.to_thread(command, "ls", "--socket", tmp_path / "s"))[1]
    with pytest.raises(LucevisorError, match="snapshots are off"):
        await asyncio.to_thread(command, "verify", "--socket", tmp_path / "s")


async def snapshot_metrics(client):
    async with client.session.get(client.url + "/metrics") as response:
        text = await response.text()
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples if "snapshot" in s.name]

    def key(sample):
        labels = [value for name, value in sample.labels.items() if name != "model"]
        return (sample.name.removeprefix("lucevisor_"), *labels)

    return {key(sample): sample.value for sample in samples}


def test_every_reason_of_a_failure_is_described():
    page = (Path(__file__).parents[2] / "docs" / "snapshot-format.md").read_text(encoding="utf-8")
    rows = page.split("## Status and metrics")[1].split("| reason | meaning |")[1].strip().splitlines()
    saves, reads, late = rows[1:4]
    assert f"`{NOT_RESTORED}`" in late
    assert set(re.findall(r"`(\w+)`", saves)) == set(FAILED_SAVES)
    assert set(re.findall(r"`(\w+)`", reads)) == {fault.value for fault in Fault}


async def test_metrics_of_snapshots(start, desk):
    store = desk.store
    client = await start(Rig(snapshots=lambda: desk.store))
    zeros = await snapshot_metrics(client)
    assert set(zeros.values()) == {0}
    reasons = {key[1] for key in zeros if key[0] == "snapshot_failures_total"}
    assert reasons == {*FAILED_SAVES, *(fault.value for fault in Fault), NOT_RESTORED}
    entry = save(store)
    reading = store.open_for_restore(entry)
    store.restored(reading.entry, 0.5)
    store.close_snapshot(reading)
    store.abort(store.begin(made_slot(50)), "no reason")
    (store.directory / entry.file).unlink()
    with pytest.raises(SnapshotRefused):
        store.open_for_restore(entry)
    last = save(store, made_slot(60))
    now = await snapshot_metrics(client)
    assert now["snapshot_bytes_total", "save"] == entry.n_bytes + last.n_bytes
    assert now["snapshot_bytes_total", "restore"] == entry.n_bytes
    assert now["snapshot_seconds_total", "restore"] == 0.5
    assert now["snapshot_seconds_total", "save"] > 0
    assert {key[1] for key, n in now.items() if key[0] == "snapshot_failures_total" and n} == {"aborted", "gone"}
    assert (now["snapshots",], now["snapshot_disk_bytes",]) == (1, last.n_bytes)


async def test_no_metrics_of_snapshots_that_are_off(start):
    assert await snapshot_metrics(await start()) == {}


@needs_root
async def test_another_user_is_refused_though_the_socket_is_open_to_all(tmp_path):
    with open_directory() as directory:
        desk = Desk(tmp_path)
        runner = await serve_admin(create_admin_app(desk), directory / "admin.sock")
        loop = asyncio.get_running_loop()
        with connect_as_nobody(directory / "admin.sock") as sock:
            await loop.sock_sendall(sock, b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = b""
            while part := await loop.sock_recv(sock, 4096):
                answer += part
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"uid 65534 may not operate a supervisor of uid 0" in answer
        await runner.cleanup()
        desk.store.close()
