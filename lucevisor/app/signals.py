"""Signals that arrive before the event loop handles them, and the meaning of a SIGHUP."""

from __future__ import annotations

import os
import signal


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
    """What a SIGHUP means: the end, when the terminal was closed that the process runs in; else a reload.

    Under nohup, or in a session without a terminal as `--daemon` and systemd make it, a closed terminal ends nothing.
    """

    def __init__(self) -> None:
        self._ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._in_terminal = _has_terminal()

    @property
    def ends(self) -> bool:
        """Whether a SIGHUP that came just now asks for the end."""
        return self._closed and not self._ignored

    @property
    def reloads(self) -> bool:
        """Whether a SIGHUP that came just now asks for a reload."""
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
