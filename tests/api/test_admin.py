"""The admin socket, a real Unix socket, and the commands that use it."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from lucevisor.app.admin import create_admin_app, serve_admin
from lucevisor.errors import LucevisorError
from lucevisor.snapshots.file_format import Fault
from lucevisor.snapshots.store import FAILED_SAVES, NOT_RESTORED, SnapshotRefused
from tests.another_user import connect_as_nobody, needs_root, open_directory
from tests.api.scripted_model import Rig
from tests.snapshots.snapshot_parts import made_slot, made_store, save
from tests.snapshots.test_cli import run


class Desk:
    """A supervisor with snapshots, behind its socket."""

    waited: tuple[float, ...] = ()
    shown: dict[str, object] = {}  # noqa: RUF012  # a test sets its own

    async def wait_ready(self, timeout_s):
        self.waited += (timeout_s,)
        return True

    def status(self):
        return self.shown

    def __init__(self, directory, disk_bytes=1 << 24):
        self.store = made_store(directory, disk_bytes=disk_bytes)

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


@pytest.mark.parametrize("sent", ["nan", "inf", "-inf", "-1", "1e999", "86401", "", "1s", "x" * 5000, "%00", "%ff"])
async def test_a_wait_that_is_no_number_of_seconds_is_refused_by_name(desk, sent):
    status, told = await desk.ask("GET", f"/ready?timeout_s={sent}")
    assert (status, told["error"].startswith("timeout_s: ")) == (400, True)
    assert desk.waited == ()


async def test_waits_that_are(desk):
    for sent in ("", "?timeout_s=0", "?timeout_s=1e3", "?timeout_s=86400"):
        assert await desk.ask("GET", f"/ready{sent}") == (200, {"ready": True})
    assert desk.waited == (0.0, 0.0, 1000.0, 86400.0)


@pytest.mark.parametrize("path", ["/restart", "/reload"])
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
    assert (await desk.ask("POST", "/restart", data=io.BytesIO(b"{" + b" " * (1 << 20))))[0] == 413
    assert (await desk.ask("GET", "/nothing"))[0] == 404
    assert (await desk.ask("GET", "/stop"))[0] == 405
    status, told = await desk.ask("POST", "/restart", data=b"{}", headers={"Content-Encoding": "gzip"})
    assert (status, told["error"]) == (415, "send the body without Content-Encoding")


async def test_figures_that_are_not_finite_are_null(desk):
    desk.shown = {"a": float("nan"), "b": [float("inf"), 1.5, (-float("inf"),)]}
    async with desk.session.get("http://admin/status") as response:
        assert json.loads(await response.text(), parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5, [None]]}


async def test_a_path_need_not_be_utf8(desk):
    desk.shown = {"file": "caf\u00e9\udcff"}
    async with desk.session.get("http://admin/status") as response:
        assert json.loads(await response.text()) == desk.shown


async def test_the_commands_work_on_the_directory_of_a_supervisor(desk, tmp_path):
    directory = desk.store.directory
    good, bad = (save(desk.store, made_slot(n)) for n in (40, 50))
    damage(directory / bad.file)

    async def ask(*arguments):
        return await asyncio.to_thread(run, *arguments, "--socket", tmp_path / "s")

    desk.shown = {"models": [{"name": "demo"}], "cache": {"dir": "", "disk_max_bytes": 1 << 24}}
    with pytest.raises(LucevisorError, match="snapshots are off"):
        await ask("ls")
    desk.shown["cache"]["dir"] = str(directory)
    assert json.loads((await ask("ls", "--json"))[1])[0]["model"] == "Made 1B"
    output = (await ask("ls"))[1]
    assert output.splitlines()[-1].endswith(" of 16.0 MiB")
    assert output.splitlines()[:-1] == run("ls", "--dir", directory)[1].splitlines()[:-1]
    assert await ask("verify", good.file) == (0, f"{good.file}: good\n1 checked, 0 damaged\n")
    assert (await ask("prune"))[1].startswith("0 files removed, ")
    code, output = await ask("verify", "--set-aside")
    assert (code, f"set aside as {bad.file}.refused" in output) == (1, True)
    code, output = await ask("prune", "--refused")
    assert (code, output.startswith(f"removed {bad.file}.refused, ")) == (0, True)
    code, output = await ask("rm", "--all")
    assert (code, output.startswith(f"removed {good.file}, ")) == (0, True)


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
