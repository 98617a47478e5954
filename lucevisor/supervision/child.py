"""One daemon process: spawned, signalled, drained and reaped here and nowhere else.

Knows no states and no messages. Invariants: the process is a child of the main thread (the kernel ties a daemon's life
to that thread); it inherits its ends of link and pulse and no other descriptor; signals and the wait go through a
pidfd, so a reused pid is never hit; it is reaped once, and nothing of it stays open afterwards.

`subprocess.Popen` starts the process. asyncio's child watcher (and uvloop's) is not used: it reaps children itself, so
a pidfd opened after the spawn may already belong to another process, and two reapers race for the exit status. See
docs/adr/0003.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import Channel
from lucevisor.protocol.transport import Link
from lucevisor.supervision.environment import Handles, Launch
from lucevisor.supervision.events import ProcessSignal
from lucevisor.supervision.output import Lines
from lucevisor.supervision.post_mortem import cause, explain_kill, oom_kills

_READ_BYTES = 65536
_DRAIN_AT_EXIT_BYTES = 4 * 2**20
_LACK = {
    errno.EMFILE: "the supervisor's limit of open files (`ulimit -n`) is reached",
    errno.ENFILE: "the machine's limit of open files (fs.file-max) is reached",
    errno.EAGAIN: "the limit of processes (`ulimit -u`, or of the control group) is reached",
    errno.ENOMEM: "the machine is out of memory",
}
"""Shortages that pass by themselves and are not the group's fault."""
_CHILD_FILES = 4096
"""A daemon's limit of open files, where the hard limit allows it. The supervisor's own is higher, for connections."""
_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_SIGNALS = {
    ProcessSignal.STACKS: (signal.SIGUSR1, signal.SIGCONT),  # a stopped process handles no signal until it is continued
    ProcessSignal.TERMINATE: (signal.SIGTERM,),
    ProcessSignal.KILL: (signal.SIGKILL,),
}


class SpawnError(Exception):
    """No process was started. `configuration`: another try would fail too; otherwise the supervisor is short of
    something.
    """

    def __init__(self, reason: str, configuration: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.configuration = configuration


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. Both None: something else in this process reaped it. `hint`: the cause, as its stderr or
    the kernel gives it.
    """

    code: int | None
    signal: int | None
    hint: str


class Child:
    """A running or just ended process, a `DaemonProcess`. The links that were opened on its sockets close them.

    `on_line(stream, line)` gets its output, `on_exit(ended)` comes once, after the last line.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        link_socket: socket.socket,
        pulse_socket: socket.socket,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[Ended], None],
    ) -> None:
        self._pidfd = os.pidfd_open(process.pid)  # the pid cannot be reused before it is reaped below
        self.pid = process.pid
        self.link_socket = link_socket
        self.pulse_socket = pulse_socket
        self.lines = {"stdout": Lines(), "stderr": Lines()}
        self._killed = False  # by this supervisor
        self._oom_kills = oom_kills()
        self._process = process
        self._on_line = on_line
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        assert process.stdout is not None
        assert process.stderr is not None
        self._pipes = {"stdout": process.stdout.fileno(), "stderr": process.stderr.fileno()}
        for stream, fd in self._pipes.items():
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, self._read, stream)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def ended(self) -> bool:
        """Whether the process is reaped."""
        return self._pidfd < 0

    def open_link(
        self, name: str, on_frame: Callable[[Frame], None], on_closed: Callable[[ProtocolError], None]
    ) -> Link:
        """Open the supervisor's end of the link."""
        return Link(self.link_socket, on_frame, on_closed, name=name)

    def open_pulse(
        self, name: str, on_frame: Callable[[Frame], None], on_closed: Callable[[ProtocolError], None]
    ) -> Link:
        """Open the supervisor's end of the pulse."""
        return Link(self.pulse_socket, on_frame, on_closed, channel=Channel.PULSE, name=name)

    def send(self, to_send: ProcessSignal) -> None:
        """Signal the process; nothing happens when it has ended. Raises ProcessLookupError when it has been reaped."""
        if self.ended:
            raise ProcessLookupError(f"process {self.pid} has ended")
        self._killed |= to_send is ProcessSignal.KILL
        for number in _SIGNALS[to_send]:
            signal.pidfd_send_signal(self._pidfd, number)

    def _read(self, stream: str) -> int:
        """Read at most one buffer from a pipe; return the number of bytes."""
        fd = self._pipes.get(stream)
        if fd is None:
            return 0
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._close_pipe(stream)
        for line in self.lines[stream].feed(data, self._loop.time()):
            self._on_line(stream, line)
        return len(data)

    def _close_pipe(self, stream: str) -> None:
        fd = self._pipes.pop(stream, None)
        if fd is None:
            return
        self._loop.remove_reader(fd)
        pipe = self._process.stdout if stream == "stdout" else self._process.stderr
        assert pipe is not None
        pipe.close()
        lines = self.lines[stream]
        for line in lines.end(self._loop.time()):
            self._on_line(stream, line)

    def _reap(self) -> None:
        """The pidfd is readable: the process has ended."""
        try:
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            code = number = None  # SIGCHLD is ignored in this process, or other code waits for all children
        else:
            if status is None:
                return
            by_exit = status.si_code == os.CLD_EXITED
            code = status.si_status if by_exit else None
            number = None if by_exit else status.si_status
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._process.returncode = -1 if code is None else code  # so that Popen does not wait for it
        for stream in ("stdout", "stderr"):
            left = _DRAIN_AT_EXIT_BYTES  # a grandchild may hold the pipe and write on
            while left > 0 and (taken := self._read(stream)):
                left -= taken
            self._close_pipe(stream)
        self._on_exit(Ended(code, number, self._hint(code, number)))

    def _hint(self, code: int | None, number: int | None) -> str:
        if number == signal.SIGKILL and not self._killed:
            return explain_kill(self._oom_kills, oom_kills())
        return cause(self.lines["stderr"].kept) if code or number in _CRASHES else ""


def _limit_files(pid: int) -> None:
    """Set a daemon's own limit of open files."""
    with contextlib.suppress(OSError):  # it has ended, or this is not permitted: it keeps the supervisor's
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(soft, _CHILD_FILES), hard))


def find_python(python: str, path: str | None) -> str:
    """Return the absolute path of an interpreter: empty is this one, a bare name is looked up on `path`.

    Links are not followed: a virtual environment's python is a link, and its name is what makes it one. Raises
    SpawnError.
    """
    if not python:
        return sys.executable
    found = shutil.which(python, path=path)
    if found is None:
        where = "is not an executable file" if os.sep in python else "is not on PATH"
        raise SpawnError(f"python = {python!r} {where}; give the path of the group's interpreter", configuration=True)
    return os.path.abspath(found)


def spawn(
    make_launch: Callable[[Handles], Launch],
    on_line: Callable[[str, str], None],
    on_exit: Callable[[Ended], None],
) -> Child:
    """Start a process with two inherited sockets, its own session and no other descriptor, and watch it.

    Its own session keeps a terminal's Ctrl-C and hang-up with the supervisor. Raises SpawnError; call it in the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a daemon is killed when the thread that spawned it ends: spawn in the main thread")
    sockets: list[socket.socket] = []
    try:
        sockets += socket.socketpair()
        sockets += socket.socketpair()
        link, child_link, pulse, child_pulse = sockets
        launch = make_launch(Handles(child_link.fileno(), child_pulse.fileno(), os.getpid()))
        process = subprocess.Popen(
            launch.argv,
            env=launch.env,
            cwd=launch.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(child_link.fileno(), child_pulse.fileno()),
            start_new_session=True,
        )
        _limit_files(process.pid)
        child_link.close()  # or end of file would never come
        child_pulse.close()
        try:
            return Child(process, link, pulse, on_line, on_exit)
        except OSError:
            with process:  # closes the pipes and reaps
                process.kill()
            raise
    except OSError as error:
        for each in sockets:
            each.close()
        what = f"{error.filename!r}: " if error.filename is not None else ""
        reason = f"cannot start a daemon: {what}{error.strerror}"
        if error.errno in _LACK:
            reason += f": {_LACK[error.errno]}; tried again until it works"
        raise SpawnError(reason, configuration=error.errno not in _LACK) from error
