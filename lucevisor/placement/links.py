"""Links between the hosts of a pipeline, what a boundary between two of them costs, and the order of hosts.

Costs are those of docs/scale.md.  Only ways from the supervisor's host are measured; two other hosts count as connected
through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

import msgspec

from lucevisor.placement.formatting import format_bytes, format_seconds

SUPERVISOR = ""
"""The supervisor's own host, as `TargetDevice.host` names it."""


class Link(msgspec.Struct, frozen=True):
    """The way to a host.  ``measured``: when, such as "2026-11-21 12:00 UTC"; empty if it is assumed."""

    round_trip_s: float
    bytes_per_s: float
    measured: str = ""

    def valid(self) -> bool:
        numbers = (self.round_trip_s, self.bytes_per_s)
        return all(map(isfinite, numbers)) and self.round_trip_s >= 0 and self.bytes_per_s > 0

    def message_s(self, n_bytes: int) -> float:
        """Return the seconds from the sending of ``n_bytes`` until the other end has read them."""
        return self.round_trip_s / 2 + 40e-6 + n_bytes / self.bytes_per_s  # both ends take 40 us

    def __str__(self) -> str:
        how = f"measured {self.measured}" if self.measured else "assumed, as it was not measured yet"
        return f"round trip {format_seconds(self.round_trip_s)}, {format_bytes(int(self.bytes_per_s))}/s, {how}"


ASSUMED = Link(200e-6, 110e6)
"""Ethernet of 1 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Links:
    """Ways from the supervisor's host; one that is not there is ``ASSUMED``."""

    of_host: Mapping[str, Link] = field(default_factory=dict)

    def between(self, a: str, b: str) -> Link | None:
        """Return the way from one host to another; None on the same host."""
        if a == b:
            return None
        ways = [self.of_host.get(host, ASSUMED) for host in (a, b) if host != SUPERVISOR]
        known = all(way.measured for way in ways)
        return Link(
            sum(way.round_trip_s for way in ways),
            min(way.bytes_per_s for way in ways),
            min(way.measured for way in ways) if known else "",
        )

    def message_s(self, a: str, b: str, n_bytes: int) -> float:
        way = self.between(a, b)
        return 0.0 if way is None else way.message_s(n_bytes)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a request sends over the boundaries: its prompt in steps of ``chunk`` rows, its answer one by one."""

    prompt_tokens: int
    chunk: int
    answer_tokens: int
    row_bytes: int

    def boundary_s(self, links: Links, a: str, b: str) -> float:
        prompt_s = links.message_s(a, b, self.chunk * self.row_bytes) * self.prompt_tokens / self.chunk
        return prompt_s + links.message_s(a, b, self.row_bytes) * self.answer_tokens

    def ways_s(self, links: Links, hosts: Sequence[str], drafter: str | None = None) -> tuple[float, ...]:
        """Return the seconds on the way into each of the shards on ``hosts``.

        Into the first one come the tokens of the last one, through the host of a ``drafter``, and a message with the
        supervisor before and behind all.
        """
        first, last = hosts[0], hosts[-1]
        drafter = last if drafter is None else drafter
        tokens_s = self.boundary_s(links, last, drafter) + self.answer_tokens * links.message_s(drafter, first, 0)
        ends_s = links.message_s(SUPERVISOR, first, 0) + links.message_s(last, SUPERVISOR, 0)
        return (tokens_s + ends_s, *(self.boundary_s(links, a, b) for a, b in pairwise(hosts)))


Order = tuple[str, ...]


def best_order(start: Order, score: Callable[[Order], tuple[float, ...]], *, drop: bool) -> Order:
    """Return an order of hosts that no single move improves, found from ``start``.

    A move puts a host elsewhere, and with ``drop`` also out of the order or into it.
    """
    best, least = start, score(start)
    while True:
        found = min(((score(order), order) for order in _moves(best, start if drop else ())), default=(least, best))
        if found[0] >= least:
            return best
        least, best = found


def _moves(order: Order, droppable: Sequence[str]) -> Iterator[Order]:
    for host in dict.fromkeys((*order, *droppable)):
        rest = tuple(other for other in order if other != host)
        if host in order and host in droppable and rest:
            yield rest
        for i in range(len(rest) + 1):
            if (moved := (*rest[:i], host, *rest[i:])) != order:
                yield moved
