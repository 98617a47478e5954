"""Daemons behind a launcher: what ssh does, on this host, with the tiny daemon behind the real bootstrap."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lucevisor.config import ClusterConfig, GroupConfig, load
from lucevisor.errors import ConfigError
from lucevisor.protocol.authentication import AuthenticationError, Purpose
from lucevisor.protocol.tcp import Credentials, connect
from lucevisor.supervision import events as ev
from lucevisor.supervision.events import State
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.launcher import Launcher, open_listener, portable_path
from lucevisor.supervision.listener import Listener
from tests.supervision.real_groups import FAST, Owner, brisk, environment_of, ready, runs, stage_tiny
from tests.waiting import until

KEY = b"k" * 32
SSH = """#!/bin/sh
shift
exec 3<&0
sh -c "$*" <&3 3<&- &
exec 3<&- </dev/null
trap 'kill $!' TERM
wait $!
"""


@asynccontextmanager
async def remote_group(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str = "",
    *,
    ssh: str = SSH,
    secret: bytes = KEY,
    mode: int = 0o600,
    python: str = sys.executable,
    limits: object = FAST,
    **env: str,
) -> AsyncIterator[GroupSupervisor]:
    """A stopped group on a host that is this one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    file, script = tmp_path / "secret", tmp_path / "ssh"
    if secret:
        file.write_bytes(secret)
        file.chmod(mode)
    if ssh:
        script.write_text(ssh)
        script.chmod(0o700)
    listener = Listener(credentials=Credentials(KEY))
    cluster = ClusterConfig(listen="127.0.0.1", secret_file=str(file), ssh=(str(script),))
    launcher = Launcher(stage_tiny(tmp_path), listener, cluster)
    config = GroupConfig(name="left", backend="cpu", host="attic", python=python, env={"TINY": how, **env})
    group = GroupSupervisor(config, 1, launcher, [Owner().callbacks()], limits=limits)  # type: ignore[arg-type]
    try:
        yield group
    finally:
        await group.stop(deadline_s=0.0)
        listener.close()
        assert not listener._awaited


def pid_there(group: GroupSupervisor) -> int:
    assert group.hello is not None
    return group.hello.pid


async def test_a_daemon_there_gets_what_a_daemon_here_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with remote_group(tmp_path, monkeypatch, "flood", OMP_NUM_THREADS="3") as group:
        await group.start()
        await ready(group)
        pid = pid_there(group)
        assert pid != group.pid
        environment = environment_of(pid)
        assert b"OMP_NUM_THREADS=3" in environment
        assert b"CUDA_VISIBLE_DEVICES=-1" in environment
        assert group.path is not None
        assert group.path.round_trip_s > 0
        assert len(group.output["stdout"]) == 400  # of a mebibyte
        assert await group.stop() is State.STOPPED
        assert not runs(pid)


async def test_stacks_and_exits_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with remote_group(tmp_path, monkeypatch, "hang at step", limits=brisk(step_s=1.0)) as group:
        await group.start()
        await ready(group)
        assert group._daemon is not None
        group._daemon.child.send(ev.ProcessSignal.STACKS)
        await until(lambda: any("most recent call first" in line for line in group.output["stderr"]))
        os.kill(pid_there(group), signal.SIGSEGV)
        await until(lambda: group.restarts == 1)
        assert "signal 11 (SIGSEGV)" in group.reason
        assert "Segmentation fault" in group.reason
        await ready(group)
        os.kill(pid_there(group), signal.SIGKILL)
        await until(lambda: group.restarts == 2)
        assert "signal 9 (SIGKILL): the supervisor did not send it" in group.reason
        await ready(group)
        launcher, daemon = group.pid, pid_there(group)
        assert launcher is not None
        os.kill(launcher, signal.SIGKILL)
        await until(lambda: group.restarts == 3)
        await until(lambda: not runs(daemon))


async def test_a_deaf_daemon_is_killed_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with remote_group(tmp_path, monkeypatch, "deaf") as group:
        await group.start()
        await ready(group)
        pid = pid_there(group)
        assert await group.stop(deadline_s=0.5) is State.STOPPED
        assert not runs(pid)


async def test_source_is_kept_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "cache" / "lucevisor" / "code" / "0123"
    in_use = old.with_name("4567")
    for directory in (old, in_use):
        directory.mkdir(parents=True)
        os.utime(directory, (0, 0))
    old.parent.chmod(0o700)  # whatever the umask
    in_use_fd = os.open(in_use, os.O_RDONLY)
    fcntl.flock(in_use_fd, fcntl.LOCK_SH)  # as by a daemon that has run for long
    async with remote_group(tmp_path, monkeypatch) as group:
        for _ in range(2):
            await group.start()
            await ready(group)
            assert group.hello is not None
            code = old.parent / group.hello.source_hash
            assert not old.exists()  # nothing was started from it for long
            kept = (code / "daemons" / "main.py").stat()
            fd = os.open(code, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(fd)
            assert await group.stop() is State.STOPPED
            (code / "daemons" / "heartbeat.py").write_text("raise SystemExit('damaged')")
        assert (code / "daemons" / "main.py").stat().st_ino == kept.st_ino
        assert {path.name for path in old.parent.iterdir()} == {code.name, in_use.name}
    os.close(in_use_fd)


async def test_source_that_other_users_can_change_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "cache" / "lucevisor" / "code"
    code.mkdir(parents=True)
    code.chmod(0o777)
    async with remote_group(tmp_path, monkeypatch) as group:
        await group.start()
        await until(lambda: group.state is State.FAILED)
        assert "code on" in group.reason
        assert "can be changed by other users" in group.reason


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"secret": b""}, "cannot be read: No such file or directory; copy the supervisor's cluster.secret_file there"),
        ({"mode": 0o640}, "can be used by other users: chmod 600"),
        ({"secret": b"other" * 10}, "cannot be reached at tcp:127.0.0.1:"),
        ({"secret": b"short"}, "holds 5 bytes, not 32 to 4096"),
        ({"ssh": ""}, "ssh': No such file or directory"),
        ({"ssh": "#!/bin/sh\necho 'attic: Permission denied (publickey).' >&2; exit 255\n"}, "denied (publickey)."),
        ({"python": "/nowhere/python"}, "/nowhere/python"),
    ],
    ids=["no secret", "readable secret", "wrong secret", "short secret", "no ssh", "ssh refused", "no python"],
)
async def test_what_is_wrong_there_is_said_here(
    case: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with remote_group(tmp_path, monkeypatch, limits=brisk(n_restarts=0), **case) as group:  # type: ignore[arg-type]
        await group.start()
        await group.wait(State.FAILED, timeout_s=100)
        assert words in group.reason
        if "other" in str(case.get("secret")):
            assert "it refused this end" in group.reason


def test_a_path_at_home_is_one_at_the_home_there() -> None:
    assert portable_path(str(Path.home() / "x" / "secret")) == "~/x/secret"
    assert portable_path("/etc/lucevisor/secret") == "/etc/lucevisor/secret"


async def test_attacks_on_the_port_disturb_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, a wrong secret, silence, and a stranger who has the secret but no channel."""
    async with remote_group(tmp_path, monkeypatch) as group:
        await group.start()
        await ready(group)
        listener = group._launcher.listener
        assert listener is not None
        host, _, port = listener.address.partition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(5)]
        with capture_logs() as logs:
            for i in range(200):
                with socket.create_connection((host, int(port))) as noise, suppress(OSError):
                    noise.sendall(os.urandom(i))
                await asyncio.sleep(0)
            for credentials in (Credentials(b"other" * 10), Credentials(KEY)):
                with pytest.raises(AuthenticationError):
                    await asyncio.to_thread(connect, listener.address, credentials, Purpose.LINK)
            await until(lambda: listener.n_refused >= 195)
        refused = [entry for entry in logs if entry["event"] == "connection refused"]
        assert len(refused) == 1
        assert "127.0.0.1" in refused[0]["reason"]
        for sock in silent:
            sock.close()
        assert (group.state, group.restarts) == (State.READY, 0)
        os.kill(pid_there(group), signal.SIGKILL)  # its successor gets in
        await until(lambda: group.restarts == 1)
        await ready(group)


async def test_a_port_that_is_in_use_is_replaced_and_an_address_of_no_interface_refused(tmp_path: Path) -> None:
    """The supervisor that is taken over from still has the port; without a cluster there is none."""
    secret, file = tmp_path / "secret", tmp_path / "box.toml"
    secret.write_bytes(KEY)
    secret.chmod(0o600)
    box = "[model]\npath = 'm.gguf'\n[groups.left]\nbackend = 'cpu'\n"
    file.write_text(box)
    assert open_listener(load(file)) is None
    cluster = f"[cluster]\nlisten = '127.0.0.1'\nsecret_file = '{secret}'\n"
    file.write_text(f"{box}host = 'attic'\n{cluster}")
    first = open_listener(load(file))
    assert first is not None
    port = first.address.rpartition(":")[2]
    with capture_logs() as logs:
        second = open_listener(load(file, [f"cluster.port={port}"]))
    assert second is not None
    assert second.address != first.address
    assert [entry["event"] for entry in logs] == ["the port is in use"]
    for listener in (first, second):
        listener.close()
        listener.close()
    with pytest.raises(ConfigError, match="cannot be listened on"):
        open_listener(load(file, ["cluster.listen=192.0.2.1"]))
