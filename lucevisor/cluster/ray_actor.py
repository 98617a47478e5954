"""Process that a Ray actor runs on its node, which need not have lucevisor: nothing of the project is imported.

The child never outlives this process (PR_SET_PDEATHSIG); it ends when the caller stops calling `beat`, or when it
writes nothing after its input has ended.  Its output waits in a bounded buffer.  Methods block, each in a thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_BUFFERED_BYTES = 256 * 1024  # of each stream
_MOST_READ_BYTES = 48 * 1024  # of each stream: Ray carries 100 kB in an answer, and more through its object store
_INPUT_END_S = 10.0  # without output after the end of its input, until the child is asked to end
_TERMINATED_S = 5.0  # from SIGTERM to SIGKILL

# In the child, before its exec: it is tied to this process, and gets back what Ray takes from its workers, signals that
# are blocked in their threads and the priority of the node.
_GUARD = """
import ctypes, os, signal, sys
parent, nice, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(parent):
    os._exit(1)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
try:
    os.setpriority(os.PRIO_PROCESS, 0, int(nice))
except OSError:
    text = "runs at nice %d, as Ray's workers do: start this node with RAY_worker_niceness=0, or as root"
    print(text % os.getpriority(os.PRIO_PROCESS, 0), file=sys.stderr, flush=True)
try:
    os.execvp(command[0], command)
except OSError as error:
    print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)
"""
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def node_environment(assigned_devices: bool) -> dict[str, str]:
    """Return the environment that `ray start` had on this node, without Ray's own variables.

    Ray gives its workers one OpenMP thread and no devices. `assigned_devices` keeps those that it assigned to this
    actor.
    """
    worker = dict(os.environ)
    node = worker
    with contextlib.suppress(OSError, KeyError):
        with open(f"/proc/{worker['RAY_RAYLET_PID']}/environ", "rb") as file:
            entries = [os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0") if entry]
        node = {name: value for name, _, value in entries}
    env = {name: value for name, value in node.items() if not name.startswith("RAY_")}
    env.pop("LD_PRELOAD", None)  # the raylet's allocator
    kept = ("LD_PRELOAD", *(_VISIBLE_DEVICES if assigned_devices else ()))
    return env | {name: worker[name] for name in kept if name in worker}


def node_niceness() -> int:
    with contextlib.suppress(OSError, KeyError):
        return os.getpriority(os.PRIO_PROCESS, int(os.environ["RAY_RAYLET_PID"]))
    return os.getpriority(os.PRIO_PROCESS, 0)


class RemoteProcess:
    """A command with its pipes. The actor ends when `beat` was not called for `silence_s`."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._seen_s = self._moved_s = time.monotonic()
        self._changed = threading.Condition()
        self._output = (bytearray(), bytearray())
        self._n_open = 2
        self._process: subprocess.Popen[bytes] | None = None
        self._failure = ""
        self._status: int | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, command: Sequence[str], assigned_devices: bool) -> str:
        """Start the command in the home directory; return why that failed, or ""."""
        threading.Thread(target=self._run, args=(list(command), assigned_devices), daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._process is not None or self._failure)
        return self._failure

    def beat(self) -> None:
        self._seen_s = time.monotonic()

    def write(self, data: bytes, last: bool) -> bool:
        """Write input; return when the pipe has taken it. False: the child has closed its end."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._process.stdin.fileno(), view) :]
        except OSError:
            return False
        if last:
            self._process.stdin.close()
            threading.Thread(target=self._end_idle, daemon=True).start()
        return True

    def read(self) -> tuple[bytes, bytes, int | None]:
        """Wait for output; return some of stdout and stderr, and with the last of it the exit status."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._output) or (self._status is not None and not self._n_open))
            out, err = (bytes(part[:_MOST_READ_BYTES]) for part in self._output)
            for part, taken in zip(self._output, (out, err), strict=True):
                del part[: len(taken)]
            self._moved_s = time.monotonic()
            self._changed.notify_all()
            more = any(self._output) or self._n_open
            return out, err, None if more else self._status

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def describe(self) -> tuple[str, int]:
        """Return the id of Ray's node, and the child's process id."""
        import ray

        return ray.get_runtime_context().get_node_id(), 0 if self._process is None else self._process.pid

    def _run(self, command: list[str], assigned_devices: bool) -> None:
        """Spawn and reap the child: it is killed when the thread that spawned it ends."""
        guarded = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), str(node_niceness()), *command]
        home = os.path.expanduser("~")
        try:
            process = subprocess.Popen(
                guarded,
                env=node_environment(assigned_devices),
                cwd=home if os.path.isdir(home) else "/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            with self._changed:
                self._failure = f"cannot start a process: {error.strerror}"
                self._changed.notify_all()
            return
        for pipe, part in ((process.stdout, self._output[0]), (process.stderr, self._output[1])):
            assert pipe is not None
            threading.Thread(target=self._pump, args=(pipe.fileno(), part), daemon=True).start()
        with self._changed:
            self._process = process
            self._changed.notify_all()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left; not reaped yet, it keeps its number
        status = process.wait()
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def _pump(self, fd: int, part: bytearray) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)

        def has_room() -> bool:
            return len(part) < _BUFFERED_BYTES

        while True:
            with self._changed:
                self._changed.wait_for(has_room)
            if not poll.poll(1000):  # a grandchild may hold a pipe of a child that has ended
                if self._status is not None:
                    break
                continue
            data = os.read(fd, 65536)
            if not data:
                break
            with self._changed:
                part += data
                self._changed.notify_all()
        with self._changed:
            self._n_open -= 1
            self._changed.notify_all()

    def _end_idle(self) -> None:
        self._moved_s = time.monotonic()
        while (left_s := self._moved_s + _INPUT_END_S - time.monotonic()) > 0:
            if self._wait_end(left_s):
                return
        self._end()

    def _end(self) -> None:
        process = self._process
        if process is not None and not self._wait_end(0.0):
            process.send_signal(signal.SIGTERM)
            if not self._wait_end(_TERMINATED_S):
                process.kill()
                self._wait_end(_TERMINATED_S)

    def _wait_end(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._status is not None, timeout_s)

    def _watch(self) -> None:
        while (left_s := self._seen_s + self._silence_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self._end()
        os._exit(1)
