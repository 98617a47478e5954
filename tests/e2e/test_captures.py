"""What operators see, in terminals of 80 and 200 columns.

With LUCEVISOR_SCREENSHOTS=DIRECTORY the pictures of docs/command-line.md are written there.
"""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.process import DEMO, Cli
from tests.e2e.terminal import Terminal

pytestmark = pytest.mark.slow

BAR = re.compile(r"━+─* read \d")


@pytest.fixture(params=[80, 200])
def columns(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def keep(terminal: Terminal, command: str, name: str) -> None:
    directory = os.environ.get("LUCEVISOR_SCREENSHOTS")
    if directory:
        name = f"terminal-{name}-{terminal.columns}"
        Path(directory, f"{name}.svg").write_text(terminal.svg(f"lucevisor {command}", name))


@contextmanager
def asked(url: str, n: int) -> Iterator[None]:
    """Within it as many clients ask, again and again."""
    over = threading.Event()

    def ask() -> None:
        body = {
            "messages": [{"role": "user", "content": "What does os.path.join do?"}],
            "max_tokens": 400,
            "ignore_eos": True,
        }
        while not over.is_set():
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
            request.add_header("Content-Type", "application/json")
            urllib.request.urlopen(request, timeout=120).read()

    threads = [threading.Thread(target=ask) for _ in range(n)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def pages_in(text: str) -> dict[str, int]:
    return {space: int(total) for space, total in re.findall(r"(full pages|recurrent states) \d+ of (\d+)", text)}


def test_a_start(user_cli: Cli, columns: int) -> None:
    with Terminal(user_cli, columns, "start", str(DEMO), "--name", "demo", "--set", "server.port=0") as terminal:
        assert terminal.read_until(lambda: BAR.search(terminal.text)), terminal.text
        keep(terminal, "start etc/demo.toml", "start")
        assert terminal.read_until(lambda: "  -d '" in terminal.text), terminal.text
        assert not BAR.search(terminal.text)
        keep(terminal, "start etc/demo.toml", "ready")
    assert terminal.code == 0


def test_a_box_at_work(user_cli: Cli, columns: int) -> None:
    user_cli.start(DEMO, name="demo")
    url = user_cli.status("demo")["url"]
    plan = json.loads(user_cli.run("plan", str(DEMO), "--json").stdout)
    metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    with asked(url, 3):
        with Terminal(user_cli, columns, "top", "--name", "demo") as terminal:
            assert terminal.read_until(lambda: terminal.text.count("req-") == 3 and "waits for" in terminal.text)
            assert terminal.read_until(lambda: re.search(r"tokens/s +\S*▇", terminal.text), 20), terminal.text
            assert not terminal.read_until(lambda: False, 3.0)
            assert "…" not in terminal.text
            keep(terminal, "top", "top")
        with Terminal(user_cli, columns, "status", "--name", "demo") as terminal:
            terminal.read_until(lambda: False)
            assert terminal.code == 0
            found = pages_in(terminal.text)
            assert "…" not in terminal.text
            keep(terminal, "status", "status")
    counted: dict[str, float] = {}
    for space, value in re.findall(
        r'^lucevisor_pages\{space="(\w+)",where="(?:device|cached|free)"\} (\S+)$', metrics, re.M
    ):
        counted[space] = counted.get(space, 0.0) + float(value)
    assert found == {"full pages": counted["full"], "recurrent states": counted["recurrent"]}
    assert str(found["full pages"]) in json.dumps(plan)
    with Terminal(user_cli, columns, "restart", "right", "--name", "demo") as terminal:
        assert terminal.read_until(lambda: "waiting for group right" in terminal.text)
        terminal.read_until(lambda: BAR.search(terminal.text))
        keep(terminal, "restart right", "restart")
        terminal.read_until(lambda: False)
        assert terminal.code == 0
        assert "is ready after" in terminal.text
    with Terminal(user_cli, columns, "logs", "-n", "30", "--name", "demo") as terminal:
        terminal.read_until(lambda: False)
        assert terminal.code == 0
        assert "POST /v1/chat/completions 200" in terminal.text
        keep(terminal, "logs -n 30", "logs")
    user_cli.stop("demo")
