"""Speeds of prefill and of snapshot I/O, measured while serving.

Knows neither engine nor files; ``snapshots/policy.py`` decides by them.
"""

from __future__ import annotations

from dataclasses import dataclass

from lucevisor.engine.pipeline import PipelineResult
from lucevisor.snapshots.policy import SnapshotSpeeds
from lucevisor.snapshots.store import StoreStatistics

_PREFILL_STEP_TOKENS = 32
_FIRST_GUESS = SnapshotSpeeds(prefill_tokens_per_s=500.0, read_bytes_per_s=4e9, step_s=0.01)
"""Reads count as fast until measured: what is never saved is never measured."""
_READ_OVER_WRITE = 2.0
"""Assumed before the first restore: reads need no fsync and hit the page cache in part."""


@dataclass(slots=True)
class SpeedMeter:
    """Totals of tokens, bytes and seconds so far."""

    n_tokens: int = 0
    seconds: float = 0.0
    n_short: int = 0
    short_s: float = 0.0
    read_bytes: int = 0
    read_s: float = 0.0

    def add(self, result: PipelineResult) -> None:
        """Count a step.  Long ones measure prefill by their slowest stage, short ones are decodes."""
        if result.step.n_tokens >= _PREFILL_STEP_TOKENS:
            self.n_tokens += result.step.n_tokens
            self.seconds += max(answer.compute_s for answer in result.results)
        else:
            self.n_short += 1
            self.short_s += sum(answer.compute_s for answer in result.results)  # without queueing

    def add_read(self, n_bytes: int, seconds: float) -> None:
        """Count a restore, up to the last shard and checksum."""
        self.read_bytes += n_bytes
        self.read_s += seconds

    def speeds(self, seen: StoreStatistics) -> SnapshotSpeeds:
        """Return current speeds, with guesses for what was not measured yet.

        Before the first restore, write speed reveals a slow disk.
        """
        guess = _FIRST_GUESS

        def per_s(n: int, seconds: float, otherwise: float) -> float:
            return n / seconds if n and seconds > 0 else otherwise

        written = per_s(seen.saved_bytes, seen.save_s, guess.write_bytes_per_s)
        likely = min(guess.read_bytes_per_s, _READ_OVER_WRITE * written) if seen.n_saved else guess.read_bytes_per_s
        return SnapshotSpeeds(
            prefill_tokens_per_s=per_s(self.n_tokens, self.seconds, guess.prefill_tokens_per_s),
            read_bytes_per_s=per_s(self.read_bytes, self.read_s, likely),
            write_bytes_per_s=written,
            step_s=self.short_s / self.n_short if self.n_short else guess.step_s,
        )
