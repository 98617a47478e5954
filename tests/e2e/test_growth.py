"""Restarts, kills and moved layers in a row leave a supervisor as it was: descriptors, threads, children, memory."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from lucevisor.cli.admin_client import AdminClient
from tests.e2e.process import DEMO, Cli, complete, tokens_of
from tests.waiting import wait_until

WARM = 2
GROUPS = ("left", "right")
BRISK = "backoff_min_s=0.01,backoff_max_s=0.02"


def pid_of(status: dict[str, Any], group: str) -> int:
    return int(next(one["pid"] or 0 for one in status["groups"] if one["name"] == group))


class Watched:
    """A supervisor whose daemons are replaced again and again."""

    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        self.status = cli.start(DEMO, "recovery.restart_limit=9999/60s", "engine.dtype=float32", limits=BRISK)
        self.process = psutil.Process(self.status["pid"])
        self.url = str(self.status["url"])
        self.prompt = tokens_of(self.url, "import os\n")
        self.right = complete(self.url, self.prompt)[0]

    def restart(self, group: str) -> None:
        AdminClient(self.cli.socket()).call("POST", "/restart", {"groups": [group], "now": True}, timeout_s=60)

    def move(self, group: str) -> None:
        split = "3,1" if group == "left" else "1,1"
        self.cli.run("reload", "--set", f"placement.target_layer_split={split}")

    def kill(self, group: str) -> None:
        pid = pid_of(self.cli.status(), group)
        os.kill(pid, signal.SIGKILL)

        def replaced() -> bool:
            now = self.cli.status()
            return now["state"] == "ready" and pid_of(now, group) not in (0, pid)

        wait_until(replaced, what="ready again")

    def held(self) -> dict[str, int]:
        """What may not grow; zombies are children, too."""
        return {
            "descriptors": self.process.num_fds(),
            "threads": self.process.num_threads(),
            "children": len(self.process.children(recursive=True)),
        }

    def grow_table(self, before: dict[str, int]) -> list[str]:
        return [what for what, n in self.held().items() if n > before[what]]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_restarts_kills_and_moves_leave_nothing(cli: Cli) -> None:
    n = 100
    watched = Watched(cli)
    for i in range(WARM):
        watched.kill(GROUPS[i % 2])
        watched.restart(GROUPS[i % 2])
        watched.move(GROUPS[i % 2])
    before, rss = watched.held(), watched.process.memory_info().rss
    for what in (watched.restart, watched.kill, watched.move):
        for i in range(n):
            what(GROUPS[i % 2])
    assert complete(watched.url, watched.prompt)[0] == watched.right
    wait_until(lambda: not watched.grow_table(before), what="connections close behind their answers")
    growth = watched.process.memory_info().rss - rss
    assert growth < 2**20 * (8 + n / 20), f"{growth / n / 3:.0f} bytes each"
    cli.stop()
