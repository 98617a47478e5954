"""One daemon process: spawned, signalled, its output read, and reaped here and nowhere else.

It is a child of the main thread, as the kernel ties its life to that, and inherits its channels and no other
descriptor.  Signals and the wait go through a pidfd, so a reused pid is never hit.  asyncio's and uvloop's child
watchers are not used: they reap by themselves, and two reapers race for the exit status (docs/adr/0003).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import lucevisor
from lucevisor.config import GroupConfig
from lucevisor.errors import LucevisorError
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.handshake import SHARED_PACKAGES, source_hash
from lucevisor.protocol.messages import StreamKind
from lucevisor.protocol.transport import Link
from lucevisor.source_tree import locate
from lucevisor.supervision.events import ProcessSignal
from lucevisor.supervision.listener import Channels, Listener

_OF_PYTHON = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONEXECUTABLE", "PYTHONSAFEPATH", "PYTHONOPTIMIZE")
_OF_VENV = ("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "__PYVENV_LAUNCHER__", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")
_OF_SYSTEMD = ("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC")
_OWN = frozenset({*_OF_PYTHON, *_OF_VENV, *_OF_SYSTEMD})
_CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
_HIP_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NO_DEVICE = "-1"


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment of a daemon: what is inherited without `unset`, `defaults` where that lacks them, and `values`."""

    unset: frozenset[str]
    defaults: Mapping[str, str]
    values: Mapping[str, str]

    def added_to(self, inherited: Mapping[str, str]) -> dict[str, str]:
        kept = {key: value for key, value in inherited.items() if key not in self.unset}
        return {**self.defaults, **kept, **self.values}


def environment(group: GroupConfig, threads: int, staging: Path | None = None) -> Environment:
    """Return the environment of the group's daemon; `threads` 0: the library's choice; `staging`: its import path.

    `groups.NAME.env` overrides all but the import path.  Other backends' visibility variables go: ROCm reads CUDA's
    too.
    """
    unset, defaults, values = set(_OWN), dict[str, str](), dict[str, str]()
    if group.backend == "cpu":
        values |= {_CUDA_VISIBLE: _NO_DEVICE, _HIP_VISIBLE[0]: _NO_DEVICE}
        unset.add(_HIP_VISIBLE[1])
        if threads > 0:
            values |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    elif group.backend == "hip":
        unset.add(_CUDA_VISIBLE)
    else:
        defaults["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi
        unset.update(_HIP_VISIBLE)
    values |= group.environment()
    values |= {
        "PYTHONSAFEPATH": "1",  # nothing of the working directory is imported, from Python 3.11 on
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
    }
    if staging is not None:
        values["PYTHONPATH"] = str(staging)
    return Environment(frozenset(unset), defaults, values)


def daemon_arguments(group: GroupConfig, threads: int, rows_host: str = "") -> list[str]:
    """Return an interpreter's arguments for the group's daemon.  `rows_host`: where it listens for neighbours' rows.

    Bytecode caches stay beside the sources: PYTHONPYCACHEPREFIX would make every start compile torch.
    """
    cores = ",".join(map(str, group.cores))
    options = [f"--group={group.name}", f"--backend={group.backend}", f"--threads={threads}", f"--cores={cores}"]
    return ["-u", "-X", "faulthandler", "-m", "daemons", *options, f"--rows={rows_host}"]


N_KEPT_LINES = 400
LONGEST_LINE = 8192


class OutputLines:
    """One stream; `kept` is what a post-mortem shows."""

    def __init__(self) -> None:
        self.kept: deque[str] = deque(maxlen=N_KEPT_LINES)
        self._rest = bytearray()
        self._cut = False  # the present line is too long: skip to its end

    def feed(self, data: bytes) -> list[str]:
        """Return the complete lines, without line ends and empty ones."""
        lines: list[str] = []
        for part in data.splitlines(keepends=True):  # bytes: at \n, \r (progress bars) and \r\n only
            text = part.rstrip(b"\r\n")
            room = LONGEST_LINE - len(self._rest)
            if not self._cut:
                self._rest += text[:room]
                self._cut = len(text) > room
            if len(text) < len(part):
                lines += self.end()
        return lines

    def end(self) -> list[str]:
        line = self._rest.decode("utf-8", "replace") + (" […]" if self._cut else "")
        self._rest.clear()
        self._cut = False
        if line:
            self.kept.append(line)
        return [line] if line else []


N_LINES_AFTER = 100
"""A traceback that this many lines follow is an old one: the process went on."""

_FATAL = "Fatal Python error: "
_FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)')
_OUR_PATH = re.compile(r".*/(?P<path>(?:daemons|lucevisor)/.+)")
_PACKAGE_PATH = re.compile(r".*/(?:site-packages|lib/python3\.\d+)/(?P<path>.+)")
_ABORTED = re.compile(  # printed by the C and C++ libraries before they abort
    r"\s+what\(\):  (?P<what>.+)"
    r"|(?P<libc>(?:free|malloc|realloc|double free|corrupted|munmap_chunk|malloc_consolidate)\b.*"
    r"|\*\*\* .+ \*\*\*.*|.*[Aa]ssertion .*failed.*)"
)


def failure_cause(output: Iterable[str]) -> str:
    """Return the line of stderr with the reason for the exit and the innermost frame of this project, or "".

    That is faulthandler's fatal error, else a traceback's exception, else the last line.
    """
    lines = list(output)
    for index in reversed(range(len(lines))):
        if lines[index].startswith(_FATAL):
            return _fatal(lines, index)
    return _exception(lines) or next((line for line in reversed(lines) if line.strip()), "")


def _fatal(lines: Sequence[str], index: int) -> str:
    cause = lines[index].removeprefix(_FATAL)
    abort = next((found for line in reversed(lines[:index]) if (found := _ABORTED.fullmatch(line))), None)
    if cause == "Aborted" and abort is not None:
        cause = f"Aborted: {(abort['what'] or abort['libc']).strip()}"
    current = next((n for n in range(index, len(lines)) if lines[n].startswith("Current thread")), None)
    return cause if current is None else cause + _innermost_frame(list(_frames(lines[current + 1 :])))


def _exception(lines: Sequence[str]) -> str:
    heads = (n for n in reversed(range(len(lines))) if lines[n].startswith("Traceback (most recent call last)"))
    head = next((n for n in heads if n == 0 or not lines[n - 1].startswith("Exception ignored")), None)
    if head is None:
        return ""
    end = next((n for n in range(head + 1, len(lines)) if not lines[n].startswith(" ")), None)
    if end is None or len(lines) - end > N_LINES_AFTER:
        return ""
    return lines[end] + _innermost_frame([frame for line in lines[head:end] if (frame := _FRAME.fullmatch(line))][::-1])


def _frames(lines: Sequence[str]) -> Iterator[re.Match[str]]:
    for line in lines:
        frame = _FRAME.fullmatch(line)
        if frame is None:
            return
        yield frame


def _innermost_frame(frames: Sequence[re.Match[str]]) -> str:
    """Return the innermost frame of this project, and that of all; `frames` come innermost first."""
    if not frames:
        return ""
    ours = next((frame for frame in frames if _OUR_PATH.fullmatch(frame["path"])), None)
    inner = f"{_short(frames[0]['path'])}:{frames[0]['line']} in {frames[0]['function']}"
    if ours is None:
        return f" (at {inner})"
    place = f"{_short(ours['path'])}:{ours['line']} in {ours['function']}"
    return f" (at {place})" if ours is frames[0] else f" (at {place}, inside {inner})"


def _short(path: str) -> str:
    match = _PACKAGE_PATH.fullmatch(path) or _OUR_PATH.fullmatch(path)
    return match["path"] if match is not None else path


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the kernel's out-of-memory killer has ended here; None if not known."""
    with contextlib.suppress(OSError):
        counts = dict(line.split() for line in vmstat.read_text(encoding="ascii").splitlines())
        return int(counts["oom_kill"]) if "oom_kill" in counts else None
    return None


def explain_kill(before: int | None, after: int | None) -> str:
    """Explain a SIGKILL that the supervisor did not send, by `oom_kills` at the spawn and now."""
    if before is not None and after is not None and after > before:
        return (
            "the kernel was out of memory and killed it; give the group fewer layers (placement.target_layer_split) "
            "or the machine more memory"
        )
    return "the supervisor did not send it: a person, a memory watcher or the kernel did (see `dmesg`)"


_SHORTAGES = {
    errno.EMFILE: "the supervisor's limit of open files (`ulimit -n`) is reached",
    errno.ENFILE: "the machine's limit of open files (fs.file-max) is reached",
    errno.EAGAIN: "the limit of processes (`ulimit -u`, or of the control group) is reached",
    errno.ENOMEM: "the machine is out of memory",
}
"""Shortages that pass by themselves and are not the group's fault."""
_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_SIGNALS = {
    ProcessSignal.STACKS: (signal.SIGUSR1, signal.SIGCONT),  # a stopped process handles no signal until it is continued
    ProcessSignal.TERMINATE: (signal.SIGTERM,),
    ProcessSignal.KILL: (signal.SIGKILL,),
}


class SpawnError(Exception):
    """No process was started. `configuration`: another try would fail too; else a resource is short."""

    def __init__(self, reason: str, configuration: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.configuration = configuration


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """End of a process. Both None: other code in this process reaped it. `hint`: the cause."""

    code: int | None
    signal: int | None
    hint: str


class Child:
    """A running or just ended process; links opened on its sockets close them. `on_exit` comes after the last line."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channels: Channels,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[ProcessEnd], None],
    ) -> None:
        self._pidfd = os.pidfd_open(process.pid)  # the pid cannot be reused before it is reaped below
        self.pid = process.pid
        self._channels = channels
        self.lines = {"stdout": OutputLines(), "stderr": OutputLines()}
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
        return self._pidfd < 0

    def open_link(
        self, name: str, on_frame: Callable[[Frame], None], on_closed: Callable[[ProtocolError], None], model: int = 0
    ) -> Link:
        files = None
        if self._channels.files:
            from lucevisor.protocol.files import FileServer  # not needed where all share memory

            files = FileServer(self._channels.files[model], f"{name} files")
        return Link(self._channels.links[model], on_frame, on_closed, name=name, files=files)

    def open_heartbeat(
        self, name: str, on_frame: Callable[[Frame], None], on_closed: Callable[[ProtocolError], None]
    ) -> Link:
        return Link(self._channels.heartbeat, on_frame, on_closed, stream=StreamKind.HEARTBEAT, name=name)

    def send(self, to_send: ProcessSignal) -> None:
        """Signal the process. Raises ProcessLookupError when it has been reaped."""
        if self.ended:
            raise ProcessLookupError(f"process {self.pid} has ended")
        self._killed |= to_send is ProcessSignal.KILL
        for number in _SIGNALS[to_send]:
            signal.pidfd_send_signal(self._pidfd, number)

    def _read(self, stream: str) -> int:
        fd = self._pipes.get(stream)
        if fd is None:
            return 0
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return 0
        if not data:
            self._close_pipe(stream)
        for line in self.lines[stream].feed(data):
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
        for line in lines.end():
            self._on_line(stream, line)

    def _reap(self) -> None:
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
            left = 4 * 2**20  # a grandchild may hold the pipe and write on
            while left > 0 and (taken := self._read(stream)):
                left -= taken
            self._close_pipe(stream)
        self._on_exit(self._end(code, number))

    def _end(self, code: int | None, number: int | None) -> ProcessEnd:
        hint = ""
        if number == signal.SIGKILL and not self._killed:
            hint = explain_kill(self._oom_kills, oom_kills())
        elif code or number in _CRASHES:
            hint = failure_cause(self.lines["stderr"].kept)
        return ProcessEnd(code, number, hint)


def _limit_files(pid: int) -> None:
    with contextlib.suppress(OSError):  # it has ended, or this is not permitted: it keeps the supervisor's
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The supervisor's is higher, for connections.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(soft, 4096), hard))


def find_python(python: str, path: str | None) -> str:
    """Return the absolute path of an interpreter: empty is this one, a bare name is looked up on `path`.

    Links are not followed: a virtual environment's python is one. Raises SpawnError.
    """
    if not python:
        return sys.executable
    found = shutil.which(python, path=path)
    if found is None:
        where = "is not an executable file" if os.sep in python else "is not on PATH"
        raise SpawnError(f"python = {python!r} {where}; give the path of the group's interpreter", configuration=True)
    return os.path.abspath(found)


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    directory: Path,
    on_line: Callable[[str, str], None],
    on_exit: Callable[[ProcessEnd], None],
    *,
    n_links: int = 1,
    listener: Listener | None = None,
    tcp: bool = False,
) -> Child:
    """Start a process with ``n_links`` links and a heartbeat: socketpairs, or with ``tcp`` connections to ``listener``,
    where each link has another one for files.

    Its own session keeps a terminal's Ctrl-C and hang-up with the supervisor. Raises SpawnError; for the main thread.
    """
    require_main_thread()
    assert listener is not None or not tcp
    # Open here, inherited ends would hide that the child has closed its own.
    with ExitStack() as inherited, starting_process() as on_failure:
        fds: list[int] = []
        if tcp and listener is not None:
            channels = listener.expect(n_links, on_failure)
        else:
            ours, options = [], []
            for option in (*["link"] * n_links, "heartbeat"):
                end, theirs = socket.socketpair()
                ours.append(on_failure.enter_context(end))
                fds.append(inherited.enter_context(theirs).fileno())
                options.append(f"--{option}=fd:{fds[-1]}")
            channels = Channels(ours[:n_links], ours[n_links], (), options)
        key_fd: int | str = ""
        if listener is not None:
            key_fd = listener.key_descriptor()
            inherited.callback(os.close, key_fd)
            fds.append(key_fd)
        process = subprocess.Popen(
            [*command, *channels.options, f"--secret={key_fd}", f"--parent-pid={os.getpid()}"],
            env=env,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=fds,
            start_new_session=True,
        )
        on_failure.push(lambda *_: kill(process))
        _limit_files(process.pid)
        return Child(process, channels, on_line, on_exit)


def require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a daemon is killed when the thread that spawned it ends: spawn in the main thread")


@contextlib.contextmanager
def starting_process() -> Iterator[ExitStack]:
    """Undo what the stack has when a process cannot be started. Raises SpawnError then."""
    with ExitStack() as on_failure:
        try:
            yield on_failure
        except OSError as error:
            what = f"{error.filename!r}: " if error.filename is not None else ""
            reason = f"cannot start a daemon: {what}{error.strerror}"
            if error.errno in _SHORTAGES:
                reason += f": {_SHORTAGES[error.errno]}; tried again until it works"
            raise SpawnError(reason, configuration=error.errno not in _SHORTAGES) from error
        on_failure.pop_all()


def kill(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes the pipes and reaps
        process.kill()


_NAME = "staging"
_DAEMONS = "daemons"


@dataclass(frozen=True, slots=True)
class StagedPackages:
    """The PYTHONPATH of every daemon, and the hash of the sources it held when the supervisor started."""

    directory: Path
    source_hash: str

    def renew(self) -> None:
        """Make the directory again if it was removed, as /run/user/UID is at the last logout. Raises LucevisorError."""
        if (self.directory / _DAEMONS).is_dir():
            return
        try:
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stage_packages(self.directory.parent)
        except OSError as error:
            raise LucevisorError(
                f"{self.directory.parent} was removed and cannot be made again: {error.strerror}; keep the run "
                "directory (`loginctl enable-linger` for /run/user), or set XDG_RUNTIME_DIR"
            ) from error


def stage_packages(run_dir: Path) -> StagedPackages:
    """Create `run_dir/staging`, replacing that of an earlier run. Raises LucevisorError naming the path."""
    package = Path(lucevisor.__file__).resolve().parent
    daemons = locate("daemons")
    if not (daemons / "__main__.py").is_file():
        raise LucevisorError(f"{daemons}: the daemons' code is missing; install lucevisor again")
    status = os.lstat(run_dir)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise LucevisorError(f"{run_dir} is not a directory of user {os.geteuid()}; remove it or set XDG_RUNTIME_DIR")
    staging = run_dir / _NAME
    if staging.is_symlink() or staging.is_file():
        staging.unlink()
    elif staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(mode=0o700)
    (staging / "lucevisor").mkdir(mode=0o700)
    (staging / _DAEMONS).symlink_to(daemons)
    (staging / "lucevisor" / "__init__.py").symlink_to(package / "__init__.py")
    for name in SHARED_PACKAGES:
        (staging / "lucevisor" / name).symlink_to(package / name)
    return StagedPackages(staging, source_hash(package, daemons))
