"""The run directory of a supervisor, mode 0700: ``lucevisor/NAME`` below ``$XDG_RUNTIME_DIR``, ``/run`` (root),
``/run/user/UID``, or ``lucevisor-UID/NAME`` below ``$TMPDIR``; and the directory of its log, which stays.

A lock held on ``lock`` means "running".  A pid is trusted only together with its boot id and start time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lucevisor.errors import NO_VALUE, ConfigError, LucevisorError, NotRunningError, unusable

_CLAIM_S = 0.5  # other processes hold the lock for moments in `is_locked`
_REMOVED_S = 5.0  # how much longer to try while other starts and stops remove the directory

_OWN = "process-"

MAX_SOCKET_BYTES = 107
"""The longest path of a Unix socket."""

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


class AlreadyRunningError(LucevisorError):
    """Another supervisor uses the name."""


@dataclass(frozen=True, slots=True)
class RunningSupervisor:
    """A running supervisor; ``pid`` is -1 while it has no pid file."""

    name: str
    socket: Path
    pid: int


def runtime_root() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base:
        return Path(base) / "lucevisor"
    if os.geteuid() == 0:
        return Path("/run/lucevisor")
    user = Path(f"/run/user/{os.geteuid()}")
    return user / "lucevisor" if user.is_dir() else Path(tempfile.gettempdir()) / f"lucevisor-{os.geteuid()}"


def run_path(name: str) -> Path:
    """Return the run directory of a name.  Raises ConfigError."""
    path = runtime_root() / check_name(name)
    if (n_bytes := len(os.fsencode(path / "handover.sock"))) > MAX_SOCKET_BYTES:
        variable = "XDG_RUNTIME_DIR" if os.environ.get("XDG_RUNTIME_DIR") else "run directory"
        why = f"is too long: a socket in it has {n_bytes} bytes of {MAX_SOCKET_BYTES}"
        raise ConfigError(variable, str(path), why, "set XDG_RUNTIME_DIR to a shorter path, or use a shorter --name")
    return path


def log_path(name: str) -> Path:
    """Return the directory that keeps the log of a name.  Raises ConfigError."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        root = Path(base) if base else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise ConfigError("XDG_STATE_HOME", "", f"is not set: {error}", "set it to a directory of yours") from error
    return root / "lucevisor" / check_name(name)


_USABLE = "letters, digits, '.', '_' and '-', at most 64, first a letter or digit"


def check_name(name: str) -> str:
    if not NAME.match(name):
        raise ConfigError("--name", name, "is not a usable name", _USABLE)
    return name


def default_name(config: Path) -> str:
    """Return the stem of a configuration file.  Raises ConfigError."""
    if not NAME.match(config.stem):
        reason = f"is not given, and the file's stem {config.stem!r} is not a usable name"
        raise ConfigError("--name", NO_VALUE, reason, f"give one: {_USABLE}")
    return config.stem


class RunDirectory:
    """Run directory of one name: claimed, or joined during a take-over and adopted later."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = run_path(name)
        self._lock: int | None = None
        self._joined = False

    @property
    def socket(self) -> Path:
        return self.path / "admin.sock"

    @property
    def handover(self) -> Path:
        return self.path / "handover.sock"

    @property
    def own(self) -> Path:
        return self.path / f"{_OWN}{os.getpid()}"

    @property
    def lock(self) -> int:
        assert self._lock is not None
        return self._lock

    def claim(self) -> None:
        """Create the directory and take the lock.  Raises AlreadyRunningError, ConfigError."""
        try:
            self._lock = self._take_lock()
            for stale in (self.socket, self.handover, self.path / "pid"):
                stale.unlink(missing_ok=True)
            for entry in self.path.glob(f"{_OWN}*"):
                if not _is_other_process(entry) and not (self._joined and entry == self.own):
                    shutil.rmtree(entry, ignore_errors=True)
            if not self._joined:
                self._make_own()
            self._write_pid()
        except OSError as error:
            self.close()
            raise unusable(self.path, error) from error

    def join(self) -> bool:
        """Use the directory together with the supervisor that holds it, if any.  Raises ConfigError."""
        if not is_locked(self.path):
            return False
        try:
            self._make_own()
        except OSError as error:
            raise unusable(self.path, error) from error
        self._joined = True
        return True

    def adopt(self, lock: int) -> None:
        """Own the name through a lock received from the old supervisor.  Raises LucevisorError."""
        if not os.path.samestat(os.fstat(lock), (self.path / "lock").stat()):
            raise LucevisorError(f"{self.path}: the lock that was handed over is not that of this directory")
        self._lock = lock
        self._write_pid()

    def release(self) -> None:
        os.close(self.lock)
        self._lock = None

    @property
    def is_intact(self) -> bool:
        """True if nothing was removed, or if another process owns the name."""
        if self._lock is None:
            return True
        try:
            held = os.path.samestat(os.fstat(self._lock), (self.path / "lock").stat())
        except OSError:
            return False
        return held and all(path.exists() for path in (self.path / "pid", self.own, self.socket, self.handover))

    def renew(self) -> None:
        """Recreate the directory, without sockets, after systemd removed it.  Raises AlreadyRunningError."""
        lock = self._try_lock()  # a new file, because the one that this process locks was removed
        if lock is None:
            lock = self.lock
            if not os.path.samestat(os.fstat(lock), (self.path / "lock").stat()):
                raise AlreadyRunningError(f"another supervisor took the name {self.name!r} (pid {read_pid(self.path)})")
        elif self._lock is not None:
            os.close(self._lock)
        self._lock = lock
        self.own.mkdir(mode=0o700, exist_ok=True)
        self._write_pid()

    def _make_own(self) -> None:
        shutil.rmtree(self.own, ignore_errors=True)
        self.own.mkdir(mode=0o700)

    def _write_pid(self) -> None:
        new = self.own / "pid"
        new.write_text(f"{os.getpid()} {boot_id()} {start_ticks(os.getpid())}\n")
        new.replace(self.path / "pid")

    def _take_lock(self) -> int:
        """Return the descriptor of the lock file, also while other starts and stops remove it."""
        give_up_s = time.monotonic() + _CLAIM_S
        while True:
            obstacle: OSError | None = None
            try:
                if (fd := self._try_lock()) is not None:
                    return fd
            except (FileNotFoundError, FileExistsError) as error:  # a supervisor that stops is removing it
                obstacle = error
            # Without a directory or lock file no other supervisor runs: others are starting and stopping right now.
            removed = isinstance(obstacle, FileNotFoundError) or (obstacle and not os.path.lexists(self.path))
            if time.monotonic() > give_up_s + (_REMOVED_S if removed else 0.0):
                if obstacle is not None:
                    raise obstacle
                pid = read_pid(self.path)
                raise AlreadyRunningError(
                    f"a supervisor named {self.name!r} runs already (pid {pid}): stop it with "
                    f"`lucevisor stop --name {self.name}`, start this one with another --name, or with --take-over"
                )
            time.sleep(0.01)

    def _try_lock(self) -> int | None:
        self.path.mkdir(parents=True, exist_ok=True)
        for part in (self.path.parent, self.path):
            if part.stat().st_uid != os.geteuid():
                raise LucevisorError(
                    f"{part} belongs to another user: remove it, or set XDG_RUNTIME_DIR to a directory of yours"
                )
            part.chmod(0o700)
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), (self.path / "lock").stat()):
                return fd
        except (BlockingIOError, FileNotFoundError):  # held, perhaps only by `is_locked`, or removed
            pass
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def close(self) -> None:
        """Remove the directory and release the name; the lock file goes last, for other starts."""
        if self._lock is None:
            shutil.rmtree(self.own, ignore_errors=True)
            return
        with contextlib.suppress(OSError):
            others = [entry for entry in self.path.glob(f"{_OWN}*") if _is_other_process(entry)]
            for entry in self.path.iterdir():
                if entry in others:
                    continue  # of a process that was about to take over
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry.name != "lock":
                    entry.unlink(missing_ok=True)
            (self.path / "lock").unlink(missing_ok=True)
            self.path.rmdir()  # fails when another start has just created a lock file
        os.close(self._lock)
        self._lock = None


def _is_other_process(own: Path) -> bool:
    pid = own.name.removeprefix(_OWN)
    return pid.isdecimal() and int(pid) != os.getpid() and start_ticks(int(pid)) is not None


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def read_pid(path: Path) -> int:
    """Return the pid in a run directory; -1: missing, of an earlier boot, or reused."""
    try:
        pid, boot, ticks = (path / "pid").read_text().split()
    except (OSError, ValueError):
        return -1
    return int(pid) if boot == boot_id() and start_ticks(int(pid)) == int(ticks) else -1


def is_locked(path: Path) -> bool:
    try:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def running_supervisors() -> list[RunningSupervisor]:
    """Return this user's running supervisors.  Raises ConfigError."""
    root = runtime_root()
    try:
        if not root.is_dir():
            return []
        if os.geteuid() not in (0, root.stat().st_uid):  # below $TMPDIR anybody may have made it
            raise unusable(root, PermissionError(errno.EPERM, "it belongs to another user"))
        return [
            RunningSupervisor(p.name, p / "admin.sock", read_pid(p))
            for p in sorted(root.iterdir())
            if p.is_dir() and is_locked(p)
        ]
    except PermissionError as error:
        raise unusable(root, error) from error


def find_supervisor(name: str | None, socket: Path | None) -> RunningSupervisor:
    """Return the supervisor that a command talks to.  Raises NotRunningError."""
    if socket is not None:
        if not socket.exists():
            raise NotRunningError(f"{socket}: there is no such socket: nothing runs there")
        return RunningSupervisor(socket.parent.name, socket, read_pid(socket.parent))
    all_running = running_supervisors()
    if name is not None:
        for supervisor in all_running:
            if supervisor.name == check_name(name):
                return supervisor
        raise NotRunningError(f"no supervisor named {name!r} runs{_names(all_running)}")
    if not all_running:
        raise NotRunningError("no supervisor runs: start one with `lucevisor start CONFIG`")
    if len(all_running) > 1:
        raise NotRunningError(f"several supervisors run{_names(all_running)}: say which with --name")
    return all_running[0]


def _names(all_running: list[RunningSupervisor]) -> str:
    return f" ({', '.join(supervisor.name for supervisor in all_running)})" if all_running else ""
