"""The router: which replica of a model gets a request, and whose requests go elsewhere. Pure.

A request goes where the least is to be computed before its answer begins: the tokens of its prompt that a replica does
not have, twice, as they take memory there, too, and those that it has to compute for others. Invariants: a replica that
does not serve, or drains, gets no request while another one can take it; requests are moved only to replicas that
serve."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

PREFIX_WEIGHT: Final = 2
"""Tokens of others that a replica computes first, in the place of one that it would have to compute again."""
RUNNING_TOKENS: Final = 128
"""The load of a request beside the tokens of its prompt: it shares the steps with others."""
WAITING_TOKENS: Final = 512
"""The further load of each request that a replica has no sequence for: it waits for the end of another one."""


class Health(StrEnum):
    """What a replica can do."""

    SERVING = auto()  # it computes
    HOLDING = auto()  # requests wait there for a daemon
    AWAY = auto()  # it refuses requests, or computes no numbers


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica, for one request. ``n_cached``: tokens of the prompt that it has; ``n_due``: those to compute for
    others; ``n_requests``: others that run or wait there."""

    n_cached: int = 0
    n_due: int = 0
    n_requests: int = 0
    max_sequences: int = 1 << 30

    @property
    def load(self) -> int:
        n_waiting = max(0, self.n_requests + 1 - self.max_sequences)
        return self.n_due + RUNNING_TOKENS * self.n_requests + WAITING_TOKENS * n_waiting


class Router:
    """The replicas of one model, by name."""

    def __init__(self, names: Collection[str]) -> None:
        self.health: Final = dict.fromkeys(names, Health.AWAY)
        self.draining: Final[set[str]] = set()
        self.n_routed: Final = dict.fromkeys(names, 0)  # requests that were sent there
        self.n_moved: Final = dict.fromkeys(names, 0)  # those that came from another one
        self._n_choices = 0
        self._chosen: Final = dict.fromkeys(names, 0)  # when each was chosen last

    # ---- events

    def begin_drain(self, name: str) -> bool:
        """Send a replica no more requests; False, changing nothing, if no other one serves."""
        if self.health[name] is Health.SERVING and not self.targets(name):
            return False
        self.draining.add(name)
        return True

    def end_drain(self, name: str) -> None:
        self.draining.discard(name)

    def on_routed(self, name: str, *, moved: bool = False) -> None:
        """Record that a replica took a request."""
        self.n_routed[name] += 1
        self.n_moved[name] += moved
        self._n_choices += 1
        self._chosen[name] = self._n_choices

    # ---- decisions

    def targets(self, source: str = "") -> list[str]:
        """Return the replicas that requests may move to, from ``source``."""
        serving = [name for name, health in self.health.items() if health is Health.SERVING]
        return [name for name in serving if name not in self.draining and name != source]

    def sources(self) -> list[str]:
        """Return the replicas whose waiting requests are to move now."""
        if not self.targets():
            return []
        return [name for name, health in self.health.items() if health is not Health.SERVING or name in self.draining]

    def order(self, n_tokens: int, candidates: Mapping[str, Candidate]) -> list[str]:
        """Return where to send a request of ``n_tokens``, the best first: those that serve and do not drain; if none
        does, those that serve; then those where it waits for a daemon."""

        def cost(name: str) -> tuple[int, int, int]:
            candidate = candidates[name]
            n_new = max(0, n_tokens - candidate.n_cached)
            return PREFIX_WEIGHT * n_new + candidate.load, candidate.load, self._chosen[name]

        def tier(name: str) -> int:
            if self.health[name] is Health.SERVING:
                return int(name in self.draining)
            return 2 if self.health[name] is Health.HOLDING else 3

        tiers = {name: tier(name) for name in candidates}
        best = min(tiers.values(), default=3)
        return sorted((name for name in candidates if tiers[name] == best < 3), key=cost)
