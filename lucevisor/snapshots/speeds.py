"""What computing a prompt and reading or writing its file take here, measured while serving.

Knows neither engine nor files; what the speeds decide is in ``snapshots/policy.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from lucevisor.engine.pipeline import PipelineResult
from lucevisor.snapshots.policy import SnapshotSpeeds
from lucevisor.snapshots.store import StoreStatistics

_PREFILL_STEP_TOKENS = 32
_FIRST_GUESS = SnapshotSpeeds(prefill_tokens_per_s=500.0, read_bytes_per_s=4e9, step_s=0.01)
"""Reading is taken for fast until it was seen to be slow: what is never saved is never measured."""
_READ_OVER_WRITE = 2.0
"""Before the first restore: reading needs no fsync, and finds some of a file in the page cache."""


@dataclass(slots=True)
class SpeedMeter:
    """What computing and disk take here, as seen so far."""

    n_tokens: int = 0
    seconds: float = 0.0
    n_short: int = 0
    short_s: float = 0.0
    read_bytes: int = 0
    read_s: float = 0.0

    def add(self, result: PipelineResult) -> None:
        """Count a step: in long ones the slowest stage says how fast prompts are computed, short ones are decodes."""
        if result.step.n_tokens >= _PREFILL_STEP_TOKENS:
            self.n_tokens += result.step.n_tokens
            self.seconds += max(answer.compute_s for answer in result.results)
        else:
            self.n_short += 1
            self.short_s += sum(answer.compute_s for answer in result.results)  # not the wait behind others

    def add_read(self, n_bytes: int, seconds: float) -> None:
        """Count a restore: until all shards had it and its checksums were compared."""
        self.read_bytes += n_bytes
        self.read_s += seconds

    def speeds(self, seen: StoreStatistics) -> SnapshotSpeeds:
        """Return the speeds as of now; guesses for what was not seen yet.

        Before the first restore, a slow disk shows in how fast files were written.
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
