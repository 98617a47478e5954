"""Worker heartbeats, log lines and load progress, sent by a second thread while the compute thread is inside a kernel.

Imports no torch.  Invariants: no method of `Reporter` blocks or raises because of the supervisor; memory held for a
supervisor that does not read is bounded (log lines and progress are dropped and counted, heartbeats are created when
sent).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from msgspec.structs import replace

from lucevisor.protocol.errors import LinkClosed
from lucevisor.protocol.messages import Heartbeat, LogLine, Progress
from lucevisor.protocol.transport import BlockingLink

HEARTBEAT_S = 0.5
N_WAITING = 1000  # log lines and progress reports kept for a slow supervisor

Phase = Literal["start", "load", "idle", "step", "score", "encode", "check"]
_SILENT = {"idle", "step", "score", "encode"}
Field = str | int | float | bool | None
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Reporter:
    """Reports of the daemon's own state.  All methods are thread-safe.

    `on_lost` is called once, from the heartbeat thread, when the supervisor closes the heartbeat.
    """

    def __init__(self, link: BlockingLink, on_lost: Callable[[], None]) -> None:
        self._link = link
        self.model = 0  # whose load reports its progress
        self._on_lost = on_lost
        self._now: tuple[Phase, int, float] = ("start", 0, time.monotonic())
        self._reported: Phase | None = None  # phase of the last heartbeat
        self._n_steps = 0
        self._n_tokens = 0
        self._free_bytes: dict[int, int] = {}
        self._waiting: deque[Progress | LogLine] = deque()
        self._n_dropped = 0
        self._lock = threading.Lock()  # of the counters and the queue; never held while sending
        self._wake = threading.Event()
        self._closing = False
        self._muted_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Send the first heartbeat now and the next ones every half second."""
        self._thread.start()

    def phase(self, phase: Phase, step_id: int = 0) -> None:
        """Set the compute thread's phase.  Every change except between idle and short work is sent at once."""
        before = self._now[0]
        self._now = (phase, step_id, time.monotonic())
        if phase != before and not {phase, before} <= _SILENT:
            self._wake.set()

    def progress(self, progress: Progress) -> None:
        """Report progress of the load, which also restarts `busy_s`."""
        phase, step_id, _ = self._now
        self._now = (phase, step_id, time.monotonic())
        self._put(replace(progress, model=self.model))

    def log(self, level: Literal["debug", "info", "warning", "error"], event: str, **fields: Field) -> None:
        """Send a structured log record."""
        self._put(LogLine(level=level, event=event, fields=fields))

    def step_done(self, n_tokens: int) -> None:
        """Count a step of `n_tokens` rows."""
        with self._lock:
            self._n_steps += 1
            self._n_tokens += n_tokens

    def memory(self, free_bytes: Mapping[int, int]) -> None:
        """Set the free bytes of devices, by index, for later heartbeats."""
        self._free_bytes = {**self._free_bytes, **free_bytes}

    def mute(self, seconds: float) -> None:
        """Send no heartbeats for so long: a fault hook."""
        self._muted_until_s = max(self._muted_until_s, time.monotonic() + seconds)

    @property
    def phase_now(self) -> Phase:
        """The phase last set."""
        return self._now[0]

    def close(self, timeout_s: float = 1.0) -> None:
        """Flush for at most `timeout_s` and end the thread."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _put(self, message: Progress | LogLine) -> None:
        with self._lock:
            if len(self._waiting) >= N_WAITING:
                self._n_dropped += 1
                return
            self._waiting.append(message)
        self._wake.set()

    def _take(self) -> list[Progress | LogLine]:
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
            if self._n_dropped:
                taken.append(
                    LogLine("warning", "heartbeat was not read: reports dropped", {"n_dropped": self._n_dropped})
                )
                self._n_dropped = 0
        return taken

    def _run(self) -> None:
        count = 0
        due = time.monotonic()
        try:
            while True:
                self._wake.clear()
                closing = self._closing
                for message in self._take():
                    self._send(message)
                phase = self._now[0]
                muted = time.monotonic() < self._muted_until_s
                if not muted and (time.monotonic() >= due or phase != self._reported):
                    self._link.send(self._heartbeat(count))
                    count += 1
                    due = time.monotonic() + HEARTBEAT_S
                if closing:
                    return
                self._wake.wait(HEARTBEAT_S if muted else max(due - time.monotonic(), 0.0))
        except LinkClosed:
            if not self._closing:
                self._on_lost()

    def _send(self, message: Progress | LogLine) -> None:
        """Send a report; one that cannot be encoded (too long, not UTF-8) must not stop the heartbeats."""
        try:
            self._link.send(message)
        except LinkClosed:
            raise
        except Exception as error:  # raised while encoding: nothing was sent
            print(f"a report cannot be sent: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)

    def _heartbeat(self, count: int) -> Heartbeat:
        phase, step_id, since = self._now
        self._reported = phase
        with self._lock:
            n_steps, n_tokens = self._n_steps, self._n_tokens
        return Heartbeat(
            count=count,
            phase=phase,
            busy_s=time.monotonic() - since,
            step_id=step_id,
            n_steps=n_steps,
            n_tokens=n_tokens,
            rss_bytes=_rss_bytes(),
            free_bytes=[n_bytes for _, n_bytes in sorted(self._free_bytes.items())],
        )


def progress_of(
    report: Callable[[Progress], None], stage: int, device: int, what: str = "read"
) -> Callable[[int, int], None]:
    """Return what takes the parts done, and all, of a stage's load on a device."""
    return lambda done, total: report(Progress(stage, device, done, total, what))


def _rss_bytes() -> int:
    """Return the resident bytes of this process; 0 when out of descriptors."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def warn_once(reporter: Reporter, logged: list[str], warnings: Iterable[str], stage: int | str) -> None:
    """Log warnings about slow paths of a stage, each once: stages of a process share kernels that failed to compile.

    ``logged``: the warnings so far.
    """
    for text in warnings:
        if text not in logged:
            logged.append(text)
            reporter.log("warning", text, stage=stage)
