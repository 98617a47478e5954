"""Daemons forked from one process that has imported torch already, instead of an interpreter for each.

Importing torch is 2 s of the processor and most of a daemon's start. A fork is the same process otherwise: its own pid
and session, a child of its supervisor, the descriptors, environment and directory that the supervisor gave it, the same
``daemons.main``. The supervisor is this process, or one that :meth:`Forker.command` runs: that one gets a forking
process of its own, a fork as well, since only a descendant's forks can become its children. Tests of the start itself
(tests/supervision, tests/deployment, some of tests/e2e/test_cli.py) start interpreters; so does a group with a
``python`` of its own.

A command that is ``lucevisor`` itself (tests/forked_command.py) is a fork, too, of the process that has imported the
command line and the supervisor by then, which is another second and a half; so are the processes that multiprocessing
spawns for it.

As a script: the process that forks. It serves requests on its standard input until that closes.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ != "__main__":  # the process that forks holds what a daemon imports, and no more
    import lucevisor
    from lucevisor.supervision import child
    from lucevisor.supervision.child import stage_packages
    from tests import cpu_library

_PR_SET_CHILD_SUBREAPER = 36
_ABOVE_ALL = 512  # descriptor numbers while the inherited ones are put in their places
_START_S = 120.0
_CHANNEL = "LUCEVISOR_FORKER"  # descriptor that a command of `Forker.command` finds its forking process by
_FORKED = ["-m", "tests.forked_command", "lucevisor"]
_COMMANDS = ("start", "plan", "logits", "bench", "demo", "operate", "cache", "logs")


class Forker:
    """The process to fork from, started when it is first needed. ``directory`` gets the packages that it imports."""

    def __init__(self, directory: Path, channel: socket.socket | None = None) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = channel
        self._asking = threading.Lock()

    @classmethod
    def inherited(cls) -> Forker:
        """The forking process that :meth:`command` gave to this one."""
        channel = socket.socket(fileno=int(os.environ.pop(_CHANNEL)))
        channel.set_inheritable(False)
        return cls(Path(), channel)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it services of this process fork their daemons."""
        real = child.subprocess
        child.subprocess = SimpleNamespace(  # type: ignore[assignment]
            Popen=self.popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            child.subprocess = real

    def popen(self, argv: Sequence[str], *, env: dict[str, str], cwd: Path, **options: Any) -> Any:
        """Fork a daemon; ``options`` as ``supervision.child`` gives them. Other interpreters and other code are
        started.
        """
        own = Path(lucevisor.__file__).resolve().parents[1] / "daemons"
        if argv[0] != sys.executable or (cwd / "daemons").resolve() != own:
            return subprocess.Popen(argv, env=env, cwd=cwd, **options)
        ordinary = {"stdin": -3, "stdout": -1, "stderr": -1, "bufsize": 0, "start_new_session": True}
        assert {k: v for k, v in options.items() if k != "pass_fds"} == ordinary, options
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        inherited = options["pass_fds"]
        arguments = list(argv[argv.index("daemons") + 1 :])
        try:
            request = {"arguments": arguments, "env": dict(env), "directory": str(cwd), "fds": [1, 2, *inherited]}
            return Fork(self._fork(request, [their_out, their_err, *inherited]), out, err)
        finally:
            os.close(their_out)
            os.close(their_err)

    def spawn(self, _: bytes, args: Sequence[str], fds: Sequence[int]) -> int:
        """Fork a process of multiprocessing's, as its ``util.spawnv_passfds`` starts one, and return its pid. Of a
        command's forking process only: others have not imported what its processes run.
        """
        at = list(args).index("-c") + 1
        inherited = sorted({1, 2, *fds})
        request = {"spawn": args[at], "arguments": ["-c", *args[at + 1 :]], "env": dict(os.environ)}
        return self._fork(request | {"directory": os.getcwd(), "fds": inherited}, inherited)

    def command(self, argv: Sequence[str], *, env: dict[str, str], cwd: Path, output: int, errors: int) -> int:
        """Execute a command as a child of this process, with ``output`` and ``errors`` as its standard output and
        error and a forking process for what it starts (:meth:`inherited`). Returns its pid, to be waited for.
        """
        request = {"command": list(argv), "env": dict(env), "directory": str(cwd), "fds": [1, 2]}
        return self._fork(request, [output, errors])

    def run(
        self, argv: Sequence[str], *, env: dict[str, str], cwd: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Execute a :meth:`command` to its end."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            pid = self.command(argv, env=env, cwd=cwd, output=output.fileno(), errors=errors.fileno())
            ended = os.pidfd_open(pid)
            in_time = select.select([ended], [], [], timeout_s)[0]
            os.close(ended)
            if not in_time:
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if not in_time:
                raise subprocess.TimeoutExpired(argv, timeout_s)
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(argv, code, output.read(), errors.read())

    def close(self) -> None:
        if self._process is not None and self._channel is not None:
            self._channel.close()
            self._process.wait(timeout=_START_S)

    def _start(self) -> socket.socket:
        if self._channel is not None:
            return self._channel
        cpu_library.share()
        self._directory.mkdir(exist_ok=True)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        staging = stage_packages(self._directory).directory
        environment = os.environ | {"PYTHONPATH": str(staging), "PYTHONIOENCODING": "utf-8:backslashreplace"}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-u", "-X", "faulthandler", __file__]
        self._process = subprocess.Popen(command, stdin=theirs, env=environment, start_new_session=True)
        theirs.close()
        self._channel.settimeout(_START_S)
        return self._channel

    def _fork(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        """The fork's pid. ``request["fds"]``: the numbers that it has ``fds`` under."""
        with self._asking:
            self._become_subreaper(True)  # the fork is orphaned at once, and so ours
            try:
                channel = self._start()
                socket.send_fds(channel, [json.dumps(request | {"parent": os.getpid()}).encode()], fds)
                return int(channel.recv(32))
            finally:
                self._become_subreaper(False)  # supervisors that leave their starter go to init as ever

    @staticmethod
    def _become_subreaper(on: bool) -> None:
        assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0


class Fork:
    """What ``supervision.child`` uses of a Popen."""

    def __init__(self, pid: int, *output: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        for name, fd in zip(("stdout", "stderr"), output, strict=False):
            setattr(self, name, open(fd, "rb", buffering=0))  # noqa: SIM115 - its owner closes it

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        os.waitpid(self.pid, 0)


def _serve(channel: socket.socket) -> list[str]:
    """Fork at every request. Returns in a daemon, with its arguments."""
    while True:
        data, fds, _, _ = socket.recv_fds(channel, 1 << 20, 32)
        if not data:
            sys.exit(0)
        request = json.loads(data)
        if request.get("command", [])[1:4] == _FORKED:
            _import_commands()
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if not pid:
                channel.detach()  # _take_over closes it, or gives its number to standard input
                _take_over(request, fds)
                if "command" in request:
                    return _execute(request["command"])
                if "spawn" in request:
                    sys.argv = request["arguments"]
                    sys.exit(exec(request["spawn"], {}))  # type: ignore[func-returns-value]
                arguments: list[str] = request["arguments"]
                return arguments
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # now the fork has the parent it shall have
        pid_text = os.read(reading, 32)
        for fd in (reading, writing, *fds):
            os.close(fd)
        channel.send(pid_text)


def _execute(command: Sequence[str]) -> list[str]:
    """Execute the command beside a forking process of its own; returns in that one's forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        return _serve(theirs)
    ours.set_inheritable(True)
    os.environ[_CHANNEL] = str(ours.fileno())
    if command[1:4] != _FORKED:
        os.execv(command[0], command)
    from tests import forked_command

    try:
        sys.exit(forked_command.run(command[3:]))  # type: ignore[func-returns-value]
    finally:  # as an interpreter ends
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _import_commands() -> None:
    """The command line and all that it runs here, from the repository: a daemon's view of it has no more than daemons
    need.
    """
    import lucevisor

    own = Path(__file__).resolve().parents[1]
    if lucevisor.__path__ == [str(own / "lucevisor")]:
        return
    sys.path.insert(1, str(own))  # perhaps again: an installation may have put it behind other packages
    lucevisor.__path__ = [str(own / "lucevisor")]
    import lucevisor.api.preprocessing
    import lucevisor.app.run

    for name in _COMMANDS:
        importlib.import_module(f"lucevisor.cli.{name}")
    importlib.import_module("tests.forked_command")
    gc.collect()
    gc.freeze()  # a collection would copy what forks share


def _take_over(request: dict[str, Any], fds: Sequence[int]) -> None:
    """Become a child of the requester, in a session of its own, with what it gave."""
    while os.getppid() != request["parent"]:
        time.sleep(0.0002)
    if "spawn" not in request:
        os.setsid()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE_ALL) for fd in fds]
    os.closerange(3, _ABOVE_ALL)
    for fd, number in zip(high, request["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["directory"])


if __name__ == "__main__":
    sys.path[0] = os.environ["PYTHONPATH"]
    import daemons.worker  # noqa: F401 - what takes so long
    from daemons.main import main

    try:
        code: object = main(_serve(socket.socket(fileno=0)))
    except SystemExit as end:
        code = end.code
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:  # multiprocessing's resource tracker closes its output
            stream.flush()
    os._exit(code if isinstance(code, int) else 0)  # taking torch down, module by module, is 0.2 s of the processor
