"""What a daemon writes to stdout and stderr, cut into lines and bounded.

Pure: knows no pipes and no logger. Invariants: never keeps more than `N_KEPT` lines nor a line longer than
`LONGEST_LINE` bytes, and passes at most `LINES_PER_SECOND` lines a second on, counting the rest.
"""

from __future__ import annotations

from collections import deque

N_KEPT = 400
LONGEST_LINE = 8192
LINES_PER_SECOND = 500


class Lines:
    """One stream. `feed` bytes as they come; `kept` is what a post-mortem shows."""

    def __init__(self) -> None:
        self.kept: deque[str] = deque(maxlen=N_KEPT)
        self._rest = bytearray()
        self._cut = False  # the present line is too long already: skip to its end
        self._second = 0.0
        self._n_passed = 0  # within this second
        self._n_dropped = 0  # since lines were last passed on

    def feed(self, data: bytes, now: float) -> list[str]:
        """Take bytes and return the complete lines to log, without line ends, decoded with replacement; empty ones
        are left out.
        """
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
        """Return what is left: the last line when it has no line end, and the count of lines that were dropped."""
        passed = self._close(now)
        return passed + self._own_up()

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
            passed = self._own_up()
        if self._n_passed >= LINES_PER_SECOND:
            self._n_dropped += 1
            return passed
        self._n_passed += 1
        return [*passed, line]

    def _own_up(self) -> list[str]:
        dropped, self._n_dropped = self._n_dropped, 0
        return [f"[{dropped} lines dropped from the log: more than {LINES_PER_SECOND} a second]"] if dropped else []
