"""A supervisor with few descriptors, and more clients than it can hold."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import sys
import urllib.request

import pytest

from tests.e2e.process import DEMO, Cli
from tests.e2e.test_faults import answer, group
from tests.waiting import wait_until

N_FILES = 200


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_connections_leave_descriptors_for_daemons_and_never_fail_a_group(cli: Cli) -> None:
    command = shlex.join([sys.executable, "-m", "lucevisor", "start", str(DEMO), "--name", "t"])
    cli.popen_raw(["sh", "-c", f"ulimit -n {N_FILES}; exec {command} --set server.port=0"])
    wait_until(cli.ready, 90, "ready")
    status = cli.status()
    before = answer(status)
    host, port = status["url"].removeprefix("http://").split(":")
    flood = []
    try:
        for _ in range(2 * N_FILES):
            flood.append(socket.create_connection((host, int(port)), timeout=20))
            with contextlib.suppress(ConnectionError):  # replaced already
                flood[-1].sendall(b"GET /health HTTP/1.1\r\nx: ")
        os.kill(group(status, "left")["pid"], signal.SIGKILL)
        wait_until(lambda: group(cli.status(), "left")["restarts"] == 1, what="a restart")
        wait_until(lambda: cli.status()["state"] == "ready", 90, "ready again")
        assert answer(status) == before
        assert [g["restarts"] for g in cli.status()["groups"]] == [1, 0]
        with urllib.request.urlopen(f"{status['url']}/metrics", timeout=20) as metrics:
            text = metrics.read().decode()
        assert 'lucevisor_connections_dropped_total{reason="replaced"}' in text
    finally:
        for one in flood:
            one.close()
    cli.stop()
