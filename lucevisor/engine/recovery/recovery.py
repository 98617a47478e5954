"""Holds requests while a daemon is away: since when, for how long, and what such pauses cost clients.

Pure; ``now`` (seconds, monotonic) is an argument.  Knows neither daemons nor steps.  Held requests keep all their
tokens and nothing in the shards; they go on once every shard is back.
Invariants: a hold begins only when a pipeline that served is lost, and ends once, by a new pipeline or by giving up; a
request that was being computed at ``max_losses`` losses in a row, without a token in between, is not tried again: it
may be what kills the daemon, and others would never be served again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from lucevisor.engine.sequence import RequestRecord

PauseReason = Literal["loss", "restart", "reload"]
"""Why requests paused: a daemon was lost, an operator restarted it, or moved layers to other daemons."""

PAUSE_REASONS: tuple[PauseReason, ...] = get_args(PauseReason)


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses of one reason, and their seconds in all."""

    n: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RecoveryStatistics:
    """Since the start.  ``held``: requests that wait for a daemon now, ``held_s``: for how long.

    A pause lasts from a loss, or the last step before a restart, until steps are planned again.  ``longest_pause_s`` is
    what a client saw: from the loss to the next token of its request, also when more losses came between.
    ``n_sequences``:
    requests that were running then and went on, once for each pause.  ``n_tokens``: their tokens that all stages
    computed again; ``n_rebuilt``: lost stages alone, prefix slots included; ``n_kept``: those whose state was handed to
    a new daemon.  ``rebuilding``: tokens done in the present rebuild, and of how many.
    """

    held: int = 0
    held_s: float = 0.0
    pauses: Mapping[PauseReason, Pauses] = field(default_factory=lambda: dict.fromkeys(PAUSE_REASONS, Pauses()))
    longest_pause_s: float = 0.0
    n_sequences: int = 0
    n_tokens: int = 0
    n_rebuilt: int = 0
    n_kept: int = 0
    rebuilding: tuple[int, int] = (0, 0)


class Recovery:
    """The hold of an engine.  ``hold_s`` 0: requests are never held."""

    def __init__(self, hold_s: float, max_losses: int) -> None:
        self.hold_s, self._max_losses = hold_s, max_losses
        self.changed = asyncio.Event()  # set when a hold begins or ends
        self.since: float | None = None  # the present hold's begin
        self.progress: Callable[[], tuple[int, int]] = lambda: (0, 0)  # tokens of the present rebuild: done, in all
        self._reason: PauseReason = "loss"
        self._n_begun = 0  # losses and restarts
        self._totals = RecoveryStatistics()

    @property
    def holding(self) -> bool:
        """Whether requests wait for a daemon."""
        return self.since is not None

    def begin(self, now: float, reason: PauseReason = "loss") -> None:
        """Begin to hold: the pipeline or a stage of it is lost, or it is paused to restart one."""
        self._n_begun += 1
        if self.hold_s > 0 and self.since is None:
            self.since, self._reason = now, reason
            self.changed.set()

    def end(self, now: float) -> None:
        """End the hold: there is a pipeline again.  Does nothing without a hold."""
        if self.since is not None:
            seconds, totals, before = now - self.since, self._totals, self._totals.pauses[self._reason]
            pauses = {**totals.pauses, self._reason: Pauses(before.n + 1, before.seconds + seconds)}
            self._totals = replace(totals, pauses=pauses, longest_pause_s=max(totals.longest_pause_s, seconds))
        self.give_up()

    def give_up(self) -> None:
        """Stop holding requests.  Does nothing without a hold."""
        if self.since is not None:
            self.since = None
            self.changed.set()

    def survives(self, record: RequestRecord) -> bool:
        """Count the last loss or restart under a running request, once; return whether it is held."""
        if record.loss != self._n_begun:
            n_known, lost = len(record.tokens), self._reason == "loss"
            counts = lost and record.n_in_flight > 0  # what only waited for its next chunk killed nobody
            record.n_losses = counts if n_known > record.lost_at else record.n_losses + counts
            record.recovered = record.recovered or lost
            record.loss, record.lost_at = self._n_begun, n_known
            record.paused_at = self.since if record.paused_at is None else record.paused_at
            self._totals = replace(self._totals, n_sequences=self._totals.n_sequences + 1)
        return record.n_losses < self._max_losses

    def keep(self, record: RequestRecord) -> bool:
        """Whether a running request whose sequence all shards have lost is held."""
        if not self.holding or record.probe is not None or not self.survives(record):
            return False
        if record.live is not None:
            self._totals = replace(self._totals, n_tokens=self._totals.n_tokens + record.live.n_computed)
        return True

    def rebuilt(self, n_tokens: int, n_kept: int) -> None:
        """Count what lost stages computed again, and the tokens whose state new daemons took over."""
        totals = self._totals
        self._totals = replace(totals, n_rebuilt=totals.n_rebuilt + n_tokens, n_kept=totals.n_kept + n_kept)

    def statistics(self, n_unfinished: int, now: float, longest_pause_s: float = 0.0) -> RecoveryStatistics:
        """Return the counts as of now; ``n_unfinished``: requests that run or wait; ``longest_pause_s``: from a loss to
        the next token of a request.
        """
        totals = replace(self._totals, longest_pause_s=max(self._totals.longest_pause_s, longest_pause_s))
        if self.since is None:
            return totals
        return replace(totals, held=n_unfinished, held_s=now - self.since, rebuilding=self.progress())
