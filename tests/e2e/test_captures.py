"""What operators see, in terminals of 80 and 200 columns.

With LUCEVISOR_SCREENSHOTS=DIRECTORY the pictures of docs/command-line.md are written there.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pyte
import pytest
from rich.console import Console
from rich.text import Text

from tests.e2e.process import DEMO, Cli


class Terminal:
    """`with Terminal(cli, columns, "status") as terminal`: runs `lucevisor status`; leaving the block ends it."""

    def __init__(self, cli: Cli, columns: int, *arguments: str, rows: int = 50) -> None:
        self.columns = columns
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            env = {k: v for k, v in cli.env.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color"}
            os.execve(sys.executable, [sys.executable, "-m", "lucevisor", *arguments], env)
        self.code: int | None = None
        self.written = b""
        """All that the command wrote."""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGINT)
            self.read_until(lambda: False, 30)
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def read_until(self, condition: Callable[[], object], seconds: float = 60.0) -> bool:
        """Show what the command writes until a condition holds (True), or the command ends or time is up (False)."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.code is not None or time.monotonic() > deadline:
                return False
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    data = os.read(self._fd, 1 << 16)
                except OSError:  # the command closed its end
                    self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                else:
                    self.written += data
                    self._stream.feed(data)
        return True

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._fd, keys.encode())

    @property
    def lines(self) -> list[str]:
        """The lines on the screen, without empty ones at the end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip().split("\n")

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def svg(self, title: str, name: str) -> str:
        """The screen as a picture; ``name`` is part of its ids."""
        console = Console(record=True, width=self.columns, file=io.StringIO(), force_terminal=True, color_system="256")
        for number in range(len(self.lines)):
            cells = [self._screen.buffer[number][column] for column in range(self.columns)]
            runs = [(style, "".join(cell.data for cell in run)) for style, run in groupby(cells, _style)]
            line = Text.assemble(*((text, style) for style, text in runs))
            line.rstrip()
            console.print(line, no_wrap=True, crop=True, highlight=False)
        svg = console.export_svg(title=title, unique_id=name)
        return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # fonts of another site


def _style(cell: pyte.screens.Char) -> str:
    colour = {"default": "", "brown": "yellow"}.get(cell.fg, cell.fg)
    if colour.startswith("bright"):
        colour = f"bright_{colour.removeprefix('bright')}".replace("brown", "yellow")
    elif len(colour) == 6 and all(digit in "0123456789abcdef" for digit in colour):
        colour = f"#{colour}"
    return " ".join(filter(None, ("bold" if cell.bold else "", "italic" if cell.italics else "", colour)))


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
        r'^lucevisor_pages\{model="[^"]+",space="(\w+)",where="(?:sequences|cached|free)"\} (\S+)$', metrics, re.M
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
