"""Splits a daemon's stdout and stderr into lines, within bounds.

Pure: knows no pipes and no logger. Invariants: keeps at most `N_KEPT` lines of at most `LONGEST_LINE` bytes, and passes
on at most `LINES_PER_SECOND` lines a second, counting the rest.
"""

from __future__ import annotations

from collections import deque

N_KEPT = 400
LONGEST_LINE = 8192
LINES_PER_SECOND = 500


class Lines:
    """One stream. `feed` it bytes; `kept` is what a post-mortem shows."""

    def __init__(self) -> None:
        self.kept: deque[str] = deque(maxlen=N_KEPT)
        self._rest = bytearray()
        self._cut = False  # the present line is too long: skip to its end
        self._second = 0.0
        self._n_passed = 0  # within this second
        self._n_dropped = 0  # since dropped lines were last reported

    def feed(self, data: bytes, now: float) -> list[str]:
        """Return the complete lines to log: decoded with replacement, without line ends, empty ones left out."""
        passed: list[str] = []
        for part in data.splitlines(keepends=True):  # bytes: at \n, \r (progress bars) and \r\n only
            text = part.rstrip(b"\r\n")
            room = LONGEST_LINE - len(self._rest)
            if not self._cut:
                self._rest += text[:room]
                self._cut = len(text) > room
            if len(text) < len(part):
                passed += self._close(now)
        return passed

    def end(self, now: float) -> list[str]:
        """Return the rest: a last line without a line end, and a line that counts those that were dropped."""
        passed = self._close(now)
        return passed + self._report_drops()

    def _close(self, now: float) -> list[str]:
        line = self._rest.decode("utf-8", "replace") + (" […]" if self._cut else "")
        self._rest.clear()
        self._cut = False
        if not line:
            return []
        self.kept.append(line)
        passed: list[str] = []
        if now - self._second >= 1.0:
            self._second, self._n_passed = now, 0
            passed = self._report_drops()
        if self._n_passed >= LINES_PER_SECOND:
            self._n_dropped += 1
            return passed
        self._n_passed += 1
        return [*passed, line]

    def _report_drops(self) -> list[str]:
        dropped, self._n_dropped = self._n_dropped, 0
        return [f"[{dropped} lines dropped from the log: more than {LINES_PER_SECOND} a second]"] if dropped else []
