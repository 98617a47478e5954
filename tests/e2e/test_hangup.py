"""SIGHUP: a reload without a lost stream; a closed terminal ends a foreground start in order and no `--daemon`."""

from __future__ import annotations

import json
import os
import pty
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.certificates import make_certificate
from tests.e2e.process import DEMO, ROOT, Cli, alive
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def in_terminal(cli: Cli, *arguments: str) -> tuple[int, int]:
    """Start a command in a terminal of its own; return its pid and the terminal's descriptor."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-m", "lucevisor", *arguments], cli.env)
    os.set_blocking(terminal, False)
    return pid, terminal


def shown(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


@pytest.mark.parametrize("early", [False, True], ids=["serving", "starting"])
def test_a_closed_terminal_ends_a_start_in_the_foreground_and_leaves_nothing(cli: Cli, early: bool) -> None:
    pid, terminal = in_terminal(cli, "start", str(DEMO), "--name", "t", "--set", "server.port=0")
    directory = cli.runtime / "lucevisor" / "t"
    wait_until(lambda: (shown(terminal), directory.exists() if early else cli.ready())[1], what="started")
    os.close(terminal)
    ended = wait_for(pid, 60)
    assert os.waitstatus_to_exitcode(ended) == 0
    assert not directory.exists()


def wait_for(pid: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"process {pid} did not end within {seconds} s")


def test_a_closed_terminal_does_not_end_a_daemon(cli: Cli) -> None:
    pid, terminal = in_terminal(cli, "start", str(DEMO), "--name", "t", "--daemon", "--set", "server.port=0")
    said = bytearray()

    def is_ready() -> bool:
        said.extend(shown(terminal))
        return b"is ready at" in said

    wait_until(is_ready, what="the command says so")
    os.close(terminal)
    wait_for(pid, 60)
    supervisor = cli.status()["pid"]
    os.kill(supervisor, signal.SIGHUP)
    time.sleep(0.5)
    assert alive(supervisor)
    assert cli.ready()
    cli.stop()
    assert not (cli.runtime / "lucevisor" / "t").exists()


def test_sighup_changes_keys_certificate_and_level_under_a_stream(cli: Cli, tmp_path: Path) -> None:
    make_certificate(tmp_path, "box")
    (tmp_path / "keys").write_text("first ann\n")
    (tmp_path / "keys").chmod(0o600)
    config = tmp_path / "box.toml"
    text = DEMO.read_text().replace('"demo/', f'"{ROOT}/etc/demo/')
    server = '[server]\napi_keys_file = "keys"\ntls_cert_file = "box.crt"\ntls_key_file = "box.key"\n'
    config.write_text(text[: text.index("[server]")] + server)
    status = cli.start(config)
    assert status["url"].startswith("https://")
    old = ssl.create_default_context(cafile=str(tmp_path / "box.crt"))

    def ask(key: str, context: ssl.SSLContext, **more: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "temperature": 0, **more}
        request = urllib.request.Request(f"{status['url']}/v1/chat/completions", json.dumps(body).encode())
        request.add_header("Authorization", f"Bearer {key}")
        request.add_header("Content-Type", "application/json")
        return urllib.request.urlopen(request, context=context, timeout=60)

    stream = ask("first", old, stream=True, max_tokens=300, ignore_eos=True)
    assert stream.readline().startswith(b"data: ")
    make_certificate(tmp_path, "box")
    (tmp_path / "keys").write_text("second bob\n")
    config.write_text(config.read_text() + '[log]\nlevel = "debug"\n')
    os.kill(status["pid"], signal.SIGHUP)
    log = cli.log()
    wait_until(lambda: "configuration reloaded" in log.read_text(), what="reloaded")
    with pytest.raises(OSError, match=r"certificate|CERTIFICATE"):
        ask("first", old)
    new = ssl.create_default_context(cafile=str(tmp_path / "box.crt"))
    with pytest.raises(OSError, match="401"):
        ask("first", new)
    assert ask("second", new, max_tokens=4).status == 200
    assert stream.read().endswith(b"data: [DONE]\n\n")
    wait_until(lambda: '"level": "debug"' in log.read_text(), what="heartbeats are logged")
    assert cli.run("reload").stdout == "nothing has changed\n"
    wait_until(
        lambda: {"ann", "bob"} <= {json.loads(r).get("key") for r in log.read_text().splitlines()},
        10,
        "both are in the log",
    )
    chat = subprocess.run(
        [sys.executable, "-m", "lucevisor", "chat", "--name", "t"], input="What does os.path.join do?\n", text=True,
        env=cli.env | {"LUCEVISOR_API_KEY": "second"}, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert "join" in chat.stdout, chat.stderr
    cli.stop()


COMMANDS = {
    "demo": ["demo"],
    "doctor": ["doctor", str(DEMO)],
    "logits": ["logits", str(DEMO), "--ids", "ids.json", "--out", "out.npz"],
    "plan": ["plan", str(DEMO), "--measure", "--set", "placement.target_layer_split=auto"],
    "start": ["start", str(DEMO), "--daemon", "--name", "t", "--set", "server.port=0"],
}


@pytest.mark.parametrize(
    ("command", "number", "after_s"),
    [
        ("demo", signal.SIGTERM, 0.5),
        ("demo", signal.SIGHUP, 5.0),
        ("doctor", signal.SIGTERM, 1.5),
        ("doctor", signal.SIGHUP, 3.0),
        ("logits", signal.SIGHUP, 1.5),
        ("logits", signal.SIGTERM, 3.0),
        ("plan", signal.SIGTERM, 3.0),
        ("start", signal.SIGINT, 0.5),
        ("start", signal.SIGHUP, 1.5),
    ],
)
def test_a_command_that_is_ended_leaves_nothing(
    cli: Cli, tmp_path: Path, command: str, number: int, after_s: float
) -> None:
    directory = cli.runtime / "tmp"  # a short path: the demo has sockets below it
    directory.mkdir()
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    cli.env["TMPDIR"] = str(directory)
    arguments = [str(tmp_path / part) if part in ("ids.json", "out.npz") else part for part in COMMANDS[command]]
    process = cli.popen(*arguments)
    time.sleep(after_s)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    # 0: it was done before; -SIGINT: Python's own end where the interrupt came inside of some package's import
    assert process.returncode in (0, 1, -signal.SIGINT), output
    assert "Traceback" not in output
    assert list(directory.iterdir()) == []
    assert list(cli.runtime.glob("lucevisor/*")) == []
    wait_until(lambda: processes_below(directory) == [], what="all processes have ended")


def processes_below(directory: Path) -> list[int]:
    """Processes whose temporary directory that is."""
    return [
        p.pid for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TMPDIR") == str(directory)
    ]
