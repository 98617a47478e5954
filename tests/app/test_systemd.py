"""What systemd is told, over a real notification socket, and the sockets and units it works with."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lucevisor.app.systemd import EXTEND_S, Notifier, SystemdReport, listen_sockets, watchdog_s

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "etc" / "systemd"


class Manager:
    """systemd's end of a notification socket."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind("\0" + address[1:] if address.startswith("@") else address)
        self.sock.setblocking(False)
        self.environ = {"NOTIFY_SOCKET": address}
        self.said: list[str] = []

    def read(self) -> list[str]:
        """All messages so far."""
        while True:
            try:
                self.said.append(self.sock.recv(4096).decode())
            except BlockingIOError:
                return self.said


@pytest.fixture
def manager(short_path: Path) -> Iterator[Manager]:
    one = Manager(str(short_path / "notify"))
    yield one
    one.sock.close()


@pytest.mark.parametrize("address", ["{folder}/abc", "@lucevisor-{name}"], ids=["path", "abstract"])
def test_a_message_has_one_assignment_a_line(address: str, short_path: Path) -> None:
    manager = Manager(address.format(folder=short_path, name=f"{short_path.name}-{id(short_path)}"))
    Notifier(manager.environ).send(STATUS="two\nlines: ü", READY=1)
    assert manager.read() == ["STATUS=two lines: ü\nREADY=1"]
    manager.sock.close()


@pytest.mark.parametrize("address", ["vsock:2:1234", "relative"])
def test_an_address_of_another_kind_is_said_once(address: str) -> None:
    with capture_logs() as said:
        notifier = Notifier({"NOTIFY_SOCKET": address})
        notifier.send(READY=1)
    assert not notifier
    assert len(said) == 1


def test_a_manager_that_is_gone_or_reads_nothing_is_logged(short_path: Path) -> None:
    with capture_logs() as said:
        Notifier({"NOTIFY_SOCKET": str(short_path / "nobody")}).send(WATCHDOG=1)
    assert [(line["event"], line["what"]) for line in said] == [("report to systemd failed", "WATCHDOG")]
    busy = Manager(str(short_path / "busy"))
    with capture_logs() as said:
        for _ in range(2000):
            Notifier(busy.environ).send(WATCHDOG=1)
            if said:
                break
    assert said
    busy.sock.close()


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "77"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "78"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_the_watchdog_interval(environ: dict[str, str], seconds: float) -> None:
    assert watchdog_s(environ, 77) == seconds


async def reported(manager: Manager, states: list[tuple[str, str]], watchdog: float = 0.0) -> SystemdReport:
    """A report that has seen each of ``states``, and the last one twice."""
    left = list(states)
    seen = asyncio.Event()

    def look() -> tuple[str, str]:
        if len(left) == 1:
            seen.set()
            return left[0]
        return left.pop(0)

    report = SystemdReport(look)
    report.use(Notifier(manager.environ), watchdog)
    task = asyncio.create_task(report.run())
    await seen.wait()
    seen.clear()
    await seen.wait()
    task.cancel()
    return report


async def test_a_start_asks_for_time_until_it_is_ready(manager: Manager) -> None:
    states = [("starting", "starting: left"), ("ready", "ready: m"), ("degraded", "away"), ("ready", "r")]
    await reported(manager, states, 0.1)
    told = [line for line in manager.read() if line != "WATCHDOG=1"]
    assert told == [
        f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}",
        "STATUS=starting: left",
        "STATUS=ready: m",
        "READY=1",
        "STATUS=away",
        "STATUS=r",
    ]
    assert manager.said.count("WATCHDOG=1") >= 4


async def test_a_start_that_failed_is_not_ready_and_asks_for_no_time(manager: Manager) -> None:
    await reported(manager, [("failed", "failed: group left is FAILED")])
    assert manager.read() == ["STATUS=failed: group left is FAILED"]


async def test_a_stop_is_said_once_and_asks_for_time(manager: Manager) -> None:
    await reported(manager, [("ready", "r"), ("draining", "draining: stops"), ("draining", "draining: stops")])
    assert manager.read()[2:] == ["STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}", "STATUS=draining: stops"]


async def test_a_reload_ends_as_it_began_also_when_it_fails(manager: Manager) -> None:
    report = await reported(manager, [("ready", "r")])
    n_before = len(manager.read())
    with pytest.raises(ValueError, match="wrong"), report.reload():
        raise ValueError("wrong")
    said = [line.partition("\n")[0] for line in manager.read()[n_before:]]
    assert said == ["RELOADING=1", "READY=1"]


async def test_a_reload_before_the_service_is_ready_is_not_told(manager: Manager) -> None:
    report = await reported(manager, [("starting", "s")])
    n_before = len(manager.read())
    with report.reload():
        pass
    assert len(manager.read()) == n_before


LISTENER = """
import os, sys
sys.path.insert(0, {root!r})
from lucevisor.app.systemd import listen_sockets
assert listen_sockets(os.environ, os.getpid() + 1) == []  # meant for another process
[sock] = listen_sockets()
print(sock.getsockname()[1], os.get_inheritable(sock.fileno()))
"""


def test_sockets_of_systemd_are_adopted_by_the_process_they_are_meant_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        code = LISTENER.format(root=str(ROOT))
        activation = [sys.executable, "-m", "tests.socket_activation", str(sock.fileno())]
        done = subprocess.run(
            [*activation, sys.executable, "-c", code], cwd=ROOT,
            pass_fds=[sock.fileno()], capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout.split() == [str(sock.getsockname()[1]), "False"], done.stderr
    assert listen_sockets({}) == []
    assert listen_sockets({"LISTEN_PID": "1", "LISTEN_FDS": "x"}, 1) == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_units_are_valid_and_confined(tmp_path: Path) -> None:
    text = (UNITS / "lucevisor@.service").read_text()
    assert text.count("/opt/lucevisor/main/bin/lucevisor ") == 2
    (tmp_path / "lucevisor@demo.service").write_text(text.replace("/opt/lucevisor/main/bin/lucevisor ", "/bin/true "))
    shutil.copy(UNITS / "lucevisor@.socket", tmp_path / "lucevisor@demo.socket")
    units = [str(tmp_path / f"lucevisor@demo.{kind}") for kind in ("service", "socket")]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    exposure = ["systemd-analyze", "security", "--offline=true", "--threshold=25", "--no-pager", units[0]]
    done = subprocess.run(exposure, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-200:]


def test_the_unit_leaves_devices_and_compilers_alone() -> None:
    lines = (UNITS / "lucevisor@.service").read_text().splitlines()
    settings = {line.partition("=")[0] for line in lines if "=" in line and not line.startswith("#")}
    assert not settings & {"PrivateDevices", "MemoryDenyWriteExecute"}
    assert {"OOMPolicy=continue", "KillMode=mixed", "Type=notify", "RestartPreventExitStatus=2"} <= set(lines)
