"""Settings of this process: signals before the event loop handles them, garbage collection, limit of open files."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
from typing import Final

_MAX_FILES: Final = 65536


class EarlySignals:
    """Handles SIGINT, SIGTERM and SIGHUP until the loop does.  Loses none, neither where Python ignores exceptions, in
    a finaliser, nor between the start of the loop and its handlers.

    `asked`: the name of a signal that asks for the end; `reload`: whether a SIGHUP asked for that.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.reload = False
        self.hangup = Hangup()
        self._raising = True
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def stop_raising(self) -> None:
        """Only record signals from now on.  Raises KeyboardInterrupt if there was one that asks for the end."""
        self._raising = False
        if self.asked:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGHUP and not self.hangup.ends:
            self.reload = self.reload or self.hangup.reloads
            return
        self.asked = signal.Signals(number).name
        if self._raising:
            raise KeyboardInterrupt


class Hangup:
    """Meaning of a SIGHUP: stop if the terminal that the process runs in was closed, else reload.

    Under nohup, or in a session without a terminal as `--daemon` and systemd make it, a closed terminal ends nothing.
    """

    def __init__(self) -> None:
        self._ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._in_terminal = _has_terminal()

    @property
    def ends(self) -> bool:
        """True if a SIGHUP now asks for the end."""
        return self._closed and not self._ignored

    @property
    def reloads(self) -> bool:
        """True if a SIGHUP now asks for a reload."""
        return not self._closed

    @property
    def _closed(self) -> bool:
        return self._in_terminal and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def freeze_gc() -> None:
    """Exclude what exists now from later collections, and make full ones rare.  Call it when everything is built.

    A full collection visits every container: 17 ms with 500 running requests, and as much again for the model's
    vocabulary and the imported modules.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 5, 100)  # a full one after 350,000 allocations, at most 40 MB of garbage


def raise_file_limit() -> int:
    """Raise the limit of open files as far as the hard limit allows, to 65,536 at most, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_FILES if soft == resource.RLIM_INFINITY else soft


def connections_within(n_files: int, n_groups: int) -> int:
    """Return how many of `n_files` connections may use, at least a quarter.  Links, pipes and starting a daemon need
    the others.
    """
    return max(n_files // 4, n_files - 192 - 16 * n_groups)
