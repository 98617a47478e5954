"""A supervisor as systemd runs it: notifications, a socket opened for it, a stop that keeps what was computed."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.app.test_systemd import Manager
from tests.e2e.process import DEMO, RULES, Cli, alive, complete, tokens_of
from tests.waiting import wait_until


@pytest.mark.slow
def test_a_service_of_systemd_starts_serves_stops_and_goes_on_warm(cli: Cli, tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    cli.env |= manager.environ | {"WATCHDOG_USEC": "2000000"}
    cache = ("engine.dtype=float32", f"cache.dir={tmp_path / 'cache'}", "cache.min_tokens=64")
    sets = [part for one in cache for part in ("--set", one)]
    with socket.create_server(("127.0.0.1", 0)) as sock:
        os.set_inheritable(sock.fileno(), True)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        command = [sys.executable, "-m", "lucevisor", "start", str(DEMO), "--name", "t", *sets]
        command += ["--set", f"server.port={sock.getsockname()[1]}"]
        activated = [sys.executable, "-m", "tests.socket_activation", str(sock.fileno()), *command]
        process = cli.popen_raw(activated, pass_fds=[sock.fileno()])
        wait_until(lambda: "READY=1" in manager.read(), what="READY=1")
        status = cli.status()
        assert (status["url"], status["pid"]) == (url, process.pid)
        asked = tokens_of(url, RULES)
        answer, n_cached = complete(url, asked)
        assert n_cached == 0
        asked += answer
        right, _ = complete(url, asked)
        wait_until(lambda: manager.read().count("WATCHDOG=1") > 2, what="a watchdog that is fed")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: manager.read().count("READY=1") == 2, what="the end of a reload")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0, output
    said = [line for line in manager.read() if line != "WATCHDOG=1"]
    assert said.index("EXTEND_TIMEOUT_USEC=30000000") < said.index("READY=1")
    assert f"STATUS=ready: lucevisor-demo-22m at {url}" in said
    assert said.index("READY=1") < said.index("STOPPING=1") < len(said) - 1
    assert [line for line in said if line.startswith("RELOADING=1\nMONOTONIC_USEC=")]
    assert "EXTEND_TIMEOUT_USEC=30000000" in said[said.index("STOPPING=1") :]
    assert not any(alive(group["pid"]) for group in status["groups"])

    again = cli.start(DEMO, *cache)
    tokens, n_cached = complete(again["url"], asked)
    assert n_cached > 64
    assert tokens == right
    assert cli.status()["cache"]["tokens"]["disk"] == n_cached
    cli.stop()
    manager.sock.close()
