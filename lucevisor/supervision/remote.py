"""Daemons on other hosts, each a child of the supervisor as any other: its launcher (``ssh HOST COMMAND``).

A launcher relays standard streams, exit status and the end of either side.  The command runs bootstrap.py, which reads
the daemon's source and then orders from standard input, as signals reach the launcher only.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lucevisor.config import ClusterConfig, GroupConfig
from lucevisor.protocol.transport import AwaitedConnection
from lucevisor.supervision.child import Child, ProcessEnd, StagedPackages, explain_kill, failure_cause
from lucevisor.supervision.events import ProcessSignal

BOOTSTRAP: Final = "import sys; stdin = sys.stdin.buffer; exec(stdin.read(int(stdin.readline())))"
OUT_OF_MEMORY: Final = "the kernel was out of memory and killed it"
"""Printed by the bootstrap."""
_ORDERS: Final = {ProcessSignal.STACKS: b"s", ProcessSignal.TERMINATE: b"t", ProcessSignal.KILL: b"k"}


def launch_command(cluster: ClusterConfig, group: GroupConfig) -> list[str]:
    """Return the command that runs the bootstrap on the group's host."""
    command = [group.python or "python3", "-I", "-c", BOOTSTRAP]
    if cluster.launcher == "ray":
        options = [f"--address={cluster.ray_address}", f"--host={group.host}", f"--name={group.name}"]
        return [sys.executable, "-m", "lucevisor.cluster.ray_exec", *options, "--", *command]
    return [*cluster.ssh, group.host, shlex.join(command)]  # a shell there splits it again


def portable_path(path: str) -> str:
    """Return a path for other hosts: one in the home directory is in that of the user there."""
    with suppress(ValueError, RuntimeError):
        return f"~/{Path(path).relative_to(Path.home())}"
    return path


def pack(packages: StagedPackages) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6, dereference=True) as archive:
        for folder, folders, files in os.walk(packages.directory, followlinks=True):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(files):
                path = Path(folder, name)
                archive.add(path, str(path.relative_to(packages.directory)))
    return buffer.getvalue()


def stdin_of(order: dict[str, Any], archive: bytes) -> bytes:
    source = Path(__file__).with_name("bootstrap.py").read_bytes()
    line = json.dumps({**order, "archive_bytes": len(archive)}).encode()
    return b"%d\n%b%b\n%b" % (len(source), source, line, archive)


class RemoteChild(Child):
    """The launcher of a daemon on another host, as that daemon."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        links: Sequence[AwaitedConnection],
        heartbeat: AwaitedConnection,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[ProcessEnd], None],
        files: Sequence[AwaitedConnection],
        stdin: bytes,
    ) -> None:
        super().__init__(process, links, heartbeat, on_line, on_exit, files)
        assert process.stdin is not None
        self._stdin, self._unsent = process.stdin, bytearray(stdin)
        os.set_blocking(self._stdin.fileno(), False)
        self._killing: asyncio.TimerHandle | None = None
        self._write()

    def send(self, to_send: ProcessSignal) -> None:
        if self.ended:
            super().send(to_send)
        self._unsent += _ORDERS[to_send]
        self._write()
        if to_send is ProcessSignal.KILL and self._killing is None:
            self._killed = True
            self._killing = self._loop.call_later(2.0, super().send, to_send)  # until the order has reached the daemon

    def _write(self) -> None:
        """Write what the pipe takes; the rest when it takes more."""
        fd = -1 if self._stdin.closed else self._stdin.fileno()
        try:
            while fd >= 0 and self._unsent:
                del self._unsent[: os.write(fd, self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(fd, self._write)
            return
        except BrokenPipeError:  # its exit follows
            self._unsent.clear()
        if fd >= 0:
            self._loop.remove_writer(fd)

    def _reap(self) -> None:
        super()._reap()
        if self.ended:
            if self._killing is not None:
                self._killing.cancel()
            if not self._stdin.closed:
                self._loop.remove_writer(self._stdin.fileno())
                self._stdin.close()

    def _end(self, code: int | None, number: int | None) -> ProcessEnd:
        """The bootstrap exits with 128 + N where the daemon ended by signal N."""
        if code is not None and 128 < code < 128 + signal.NSIG:
            number, code = code - 128, None
        if self._killed or code == 0:
            return ProcessEnd(code, number, "")
        lines = self.lines["stderr"].kept
        if number == signal.SIGKILL:  # of which the daemon had no time to say anything
            return ProcessEnd(code, number, OUT_OF_MEMORY if OUT_OF_MEMORY in lines else explain_kill(None, None))
        return ProcessEnd(code, number, failure_cause(lines))
