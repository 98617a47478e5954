"""Starts daemons, here or on the host of their group, with the supervisor's own sources; use it in the main thread.

One on another host is for supervision its launcher (``ssh HOST COMMAND``), a child as any other, which relays standard
streams, exit status and the end of either side.  The command runs bootstrap.py, which reads the daemon's source and
then orders from standard input, as signals reach the launcher only.
"""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final

import structlog

from lucevisor.config import ClusterConfig, Config, GroupConfig, read_credentials
from lucevisor.errors import ConfigError, LucevisorError
from lucevisor.supervision.child import (
    Child,
    ProcessEnd,
    SpawnError,
    StagedPackages,
    daemon_arguments,
    environment,
    explain_kill,
    failure_cause,
    find_python,
    kill,
    require_main_thread,
    spawn,
    starting_process,
)
from lucevisor.supervision.events import ProcessSignal
from lucevisor.supervision.listener import Listener


def open_listener(config: Config) -> Listener | None:
    """Listen where daemons of a configuration connect; None where all have socketpairs.  Raises ConfigError.

    A port in use, as of a supervisor that is taken over from, is replaced by a free one.
    """
    cluster = config.cluster
    if all(group.shares_memory for group in config.groups.values()):
        return None
    if not cluster.listen:
        return Listener()
    credentials = read_credentials(cluster)
    try:
        try:
            return Listener(cluster.listen, cluster.port, credentials)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or cluster.port == 0:
                raise
            listener = Listener(cluster.listen, 0, credentials)
            _log.warning("the port is in use", port=cluster.port, instead=listener.address)
            return listener
    except OSError as error:
        why, hint = f"cannot be listened on: {error.strerror or error}", "name an address of this host"
        raise ConfigError("cluster.listen", cluster.listen, why, hint, file=str(config.file)) from None


_log = structlog.get_logger("lucevisor.supervision")


class Launcher:
    """`listener`: where daemons connect without socketpair; with it all listen for rows of neighbours."""

    def __init__(
        self, staging: StagedPackages, listener: Listener | None = None, cluster: ClusterConfig | None = None
    ) -> None:
        self.source_hash = staging.source_hash
        self.listener = listener
        self._staging, self._cluster = staging, cluster or ClusterConfig()

    def launch(
        self,
        config: GroupConfig,
        threads: int,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[ProcessEnd], None],
        n_links: int = 1,
    ) -> Child:
        try:
            self._staging.renew()
        except LucevisorError as error:
            raise SpawnError(str(error), configuration=True) from error
        rows_host = self.listener.host if self.listener is not None else ""
        arguments = daemon_arguments(config, threads, rows_host)
        arguments.append(f"--cache-dir={portable_path(self._cluster.cache_dir)}")
        if config.host:
            return self._launch_remote(config, threads, arguments, on_line, on_exit, n_links)
        if self.listener is not None:
            arguments += [f"--tls={file}" for file in self._tls_files]
        python = find_python(config.python, {**os.environ, **config.environment()}.get("PATH"))
        directory = self._staging.directory
        env = environment(config, threads, directory).added_to(os.environ)
        tcp = not config.shares_memory
        return spawn(
            [python, *arguments], env, directory, on_line, on_exit, n_links=n_links, listener=self.listener, tcp=tcp
        )

    def _launch_remote(
        self,
        config: GroupConfig,
        threads: int,
        arguments: list[str],
        on_line: Callable[[str, str], None],
        on_exit: Callable[[ProcessEnd], None],
        n_links: int,
    ) -> Child:
        require_main_thread()
        assert self.listener is not None  # a host needs [cluster]
        env = environment(config, threads)
        with starting_process() as on_failure:
            channels = self.listener.expect(n_links, on_failure)
            order = {
                "hash": self.source_hash,
                "arguments": [*arguments, *channels.options],
                "unset": sorted(env.unset),
                "defaults": dict(env.defaults),
                "env": dict(env.values),
                "secret_file": portable_path(self._cluster.secret_file),
                "tls_files": [portable_path(file) for file in self._tls_files],
            }
            stdin = stdin_of(order, self._archive)
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                launch_command(self._cluster, config),
                cwd="/", stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True,
            )  # fmt: skip
            on_failure.push(lambda *_: kill(process))
            child = RemoteChild(process, channels, on_line, on_exit)
            child.begin(stdin)
            return child

    @property
    def _tls_files(self) -> list[str]:
        return [self._cluster.tls_cert_file, self._cluster.tls_key_file] if self._cluster.tls_cert_file else []

    @cached_property
    def _archive(self) -> bytes:
        return pack(self._staging)


# ---- daemons on other hosts

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
    """The launcher of a daemon on another host, as that daemon; it reads its orders from standard input."""

    _unsent = b""
    _killing: asyncio.TimerHandle | None = None

    def begin(self, stdin: bytes) -> None:
        """Write what starts the daemon."""
        os.set_blocking(self._stdin.fileno(), False)
        self._write(stdin)

    def send(self, to_send: ProcessSignal) -> None:
        if self.ended:
            super().send(to_send)
        self._write(_ORDERS[to_send])
        if to_send is ProcessSignal.KILL and self._killing is None:
            self._killed = True
            self._killing = self._loop.call_later(2.0, super().send, to_send)  # until the order has reached the daemon

    def _write(self, data: bytes = b"") -> None:
        """Write what the pipe takes; the rest when it takes more."""
        self._unsent += data
        fd = -1 if self._stdin.closed else self._stdin.fileno()
        try:
            while fd >= 0 and self._unsent:
                self._unsent = self._unsent[os.write(fd, self._unsent) :]
        except BlockingIOError:
            self._loop.add_writer(fd, self._write)
            return
        except BrokenPipeError:  # its exit follows
            self._unsent = b""
        if fd >= 0:
            self._loop.remove_writer(fd)

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

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
