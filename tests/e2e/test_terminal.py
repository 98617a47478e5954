"""The commands in a terminal of 80 columns: the live view of a start and a restart, the log."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.e2e.process import DEMO, Cli
from tests.e2e.terminal import Terminal

pytestmark = pytest.mark.slow

NEXT = re.compile(r"[\r\n]+|\x1b\[\d*[A-HJK]")  # what moves the cursor elsewhere
PATIENCE_S = 180.0
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def in_terminal(cli: Cli, *arguments: str, interrupt_after: str = "") -> tuple[int | None, list[str]]:
    """Run a command in a terminal; return its exit code and all lines it ever drew, without control codes.

    ``interrupt_after``: what must appear before it gets SIGINT.
    """
    with Terminal(cli, 80, *arguments, rows=40) as terminal:
        if interrupt_after:
            assert terminal.read_until(lambda: interrupt_after.encode() in terminal.written, PATIENCE_S), terminal.text
            os.kill(terminal.pid, signal.SIGINT)
        terminal.read_until(lambda: False, PATIENCE_S)
    return terminal.code, [CONTROL.sub("", line) for line in NEXT.split(terminal.written.decode())]


def test_a_start_in_the_foreground_ends_with_the_address_and_a_request_to_copy(user_cli: Cli) -> None:
    code, lines = in_terminal(
        user_cli, "start", str(DEMO), "--name", "t", "--set", "server.port=0", interrupt_after='"temperature": 0}'
    )
    text = "\n".join(lines)
    assert code == 0, text
    assert re.search(r"^group (left|right) is starting for .*start asked$", text, re.MULTILINE)
    assert re.search(r"^start: \d+\.\d s, waiting for group left, group right$", text, re.MULTILINE)
    assert re.search(r"^curl http://127\.0\.0\.1:\d+/v1/chat/completions \\$", text, re.MULTILINE)
    assert not re.search(r"^\s*─{30} ", text, re.MULTILINE)  # no empty bars
    assert [line for line in lines if len(line) > 80] == []


def test_a_start_a_restart_and_the_log_of_a_supervisor_in_the_background(user_cli: Cli) -> None:
    code, lines = in_terminal(user_cli, "start", str(DEMO), "--name", "t", "--daemon", "--set", "server.port=0")
    assert code == 0
    assert any(line.startswith("start: ") for line in lines)
    assert any("t is ready at http://" in line for line in lines)
    code, lines = in_terminal(user_cli, "restart", "right")
    assert code == 0
    assert any(re.fullmatch(r"restart: \d+\.\d s, waiting for (group right|the pipeline)", line) for line in lines)
    with Terminal(user_cli, 80, "top", "--every", "0.2") as terminal:
        assert terminal.read_until(lambda: "waits for" in terminal.text, PATIENCE_S), terminal.text
        terminal.type("q")
        terminal.read_until(lambda: False, PATIENCE_S)
    assert terminal.code == 0
    code, lines = in_terminal(user_cli, "logs", "-n", "5")
    assert code == 0
    assert len([line for line in lines if re.match(r"\d\d:\d\d:\d\d\.\d{3} \[", line)]) == 5
    user_cli.stop()
