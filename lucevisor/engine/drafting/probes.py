"""Probes: drafts that are asked for only to measure a width, or to see whether they are accepted.

Pure; costs in plain decode steps.  speculation.py says which widths promise enough; here is what a probe may cost, when
it ends, and how long the next one waits after one in vain.

Invariant: at most one runs; of many slices (``MANY_SLICES``) it is one warm step, behind which nothing is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lucevisor.engine.drafting.budget import MOST_PROBES, PROBE_SHARE, Allowance
from lucevisor.engine.drafting.costs import LEAST_GAIN, MANY_SLICES, BatchCosts

PROBE_STEPS: Final = 3
"""Steps of a probe of few slices: the first two of a new shape compile and capture."""
WIDER_GAIN: Final = 1.015
"""What one more draft of many slices must promise over those that are made to be tried."""
STALE_STEPS: Final = 256
"""Steps after which a width's time may be measured again."""
FEW_STALE_STEPS: Final = 32
"""The same of many slices while fewer steps were measured than a probe of few slices has: one may be disturbed."""
STALE_PLAIN_STEPS: Final = 256
"""The same for plain decoding, by which losses are counted; less while few plain steps were measured."""
PLAIN_INTERVAL: Final = 4
"""Steps between measurements of plain decoding, for each one that was made."""
EVER: Final = 1 << 62
"""Steps: however long ago."""
VAIN_WAIT: Final = 2.0
"""Times its cost that decoding must have earned before drafts of many slices are tried again after a try in vain; the
wait doubles with each."""


def usable_widths(costs: BatchCosts, choosable: Sequence[int]) -> Sequence[int]:
    """Return the widths to choose from: of many slices those that were measured, so that others are tried by probes."""
    return choosable if not costs.many else [n for n in choosable if not n or costs.is_known(n, EVER)]


def wanted_widths(
    costs: BatchCosts, choosable: Sequence[int], rate: float, mean: Sequence[float], *, drafting: bool, may_check: bool
) -> list[int]:
    """Return the widths that are worth a probe, the most urgent first: plain decoding, those that may be better than
    what yields ``rate`` tokens a second, and if nothing is drafted the best one, to see whether drafts are accepted.

    Of many slices one more draft than was measured is tried at a time.  ``mean``: tokens of a slice by width.
    """
    wanted: list[int] = []
    if drafting and not costs.is_known(0, min(STALE_PLAIN_STEPS, PLAIN_INTERVAL * costs.n_plain)):
        wanted.append(0)
    widths = choosable[1:]
    if costs.many:
        if not costs.n_plain:
            return wanted  # so many decode for the first time, maybe for a moment
        most = usable_widths(costs, choosable)[-1] + 1
        widths = [n for n in widths if n <= most]
    for width in widths:
        promised, n_known = costs.n_slices * mean[width] / costs.optimistic_s(width), costs.n_known(width)
        fresh = FEW_STALE_STEPS if costs.many and n_known < PROBE_STEPS else STALE_STEPS
        least = 1.0 if n_known or not costs.many else WIDER_GAIN if drafting else LEAST_GAIN
        if promised > least * rate and not costs.is_known(width, fresh):
            wanted.append(width)
    if may_check:
        wanted.append(max(widths, key=lambda width: mean[width] / costs.round_s(width)))
    return wanted


@dataclass(slots=True)
class WidthProbe:
    """``n_left`` steps of ``width`` drafts with ``n_slices`` slices, to be measured within ``n_steps_left`` steps.

    ``expected``: drafts of a slice to be accepted, by the estimate that justified the probe.  ``lost``: plain steps
    that each of its own loses.  ``is_credit``: it began when nothing was left to lose.  ``is_check``: it began without
    drafts.
    """

    n_slices: int
    width: int
    expected: float
    lost: float = 0.0
    is_credit: bool = False
    is_check: bool = False
    n_left: int = PROBE_STEPS
    n_steps_left: int = 4 * PROBE_STEPS
    verifying: bool = False  # its only step was planned
    judged: bool = False  # verdicts on its drafts are there

    @property
    def many(self) -> bool:
        """Whether it is of one warm step."""
        return self.n_slices >= MANY_SLICES

    def asks(self, n_slices: int) -> bool:
        """Whether a step of so many slices asks for its drafts."""
        return n_slices == self.n_slices and not self.verifying

    def n_verify(self, n_drafts: int, n_slices: int) -> int:
        """Return how many drafts a step verifies for it, of those there are; 0: it does not concern the step."""
        if not self.many:
            return min(n_drafts, self.width)
        if not self.width or n_drafts < self.width or n_slices != self.n_slices:
            return 0
        self.verifying = True
        return self.width

    def stepped(self, n_rows: int, n_slices: int, *, fewer: bool, cold: bool) -> bool:
        """Count a step, of which unsure drafts may have been left out (``fewer``); return whether it was the last."""
        self.n_steps_left -= 1
        if n_slices == self.n_slices and (fewer or n_rows == n_slices * (1 + self.width)):
            self.n_left -= not (self.many and cold)
            self.verifying = self.many and not cold
        return not self.n_left or not self.n_steps_left or n_slices != self.n_slices


class Probes:
    """The probe that runs, and what probes may cost."""

    def __init__(self) -> None:
        self.running: WidthProbe | None = None
        self._budget = Allowance.for_probes()
        self._check: WidthProbe | None = None  # the last one of many slices, until it is known whether it was in vain
        self._n_vain, self._wait = 0, 0.0  # checks in a row; plain steps to be earned before the next one

    def begin(self, probe: WidthProbe, n_steps: int) -> bool:
        """Begin with a probe of ``n_steps`` if there is room for it; return whether there is."""
        if probe.many:
            n_steps, room = 1, probe.lost <= self._budget.balance and (self._wait <= 0 or not probe.is_check)
        else:
            room = PROBE_STEPS * probe.lost <= self._budget.balance
        if room:
            self._budget.gain(-n_steps * probe.lost)
            probe.n_left, probe.n_steps_left = n_steps, 4 * (PROBE_STEPS if probe.many else n_steps)
            self.running = probe
            self._check = probe if probe.many and probe.is_check else self._check
        return room

    def verified(self, n_accepted: int, n_slices: int) -> bool:
        """Note a verdict; one that succeeds pays for the next.  Returns whether the width is to be chosen again."""
        probe = self.running
        if probe is None or (probe.many and not probe.verifying):
            return False
        self._budget.gain((n_accepted - probe.expected) / n_slices)
        probe.judged = True
        return probe.verifying

    def stepped(self, n_rows: int, n_slices: int, *, fewer: bool, cold: bool) -> bool:
        """Count a step as WidthProbe does; return whether the probe ended with it."""
        ended = self.running is not None and self.running.stepped(n_rows, n_slices, fewer=fewer, cold=cold)
        self.running = None if ended else self.running
        return ended

    def end_older(self) -> None:
        """End a probe that began before all was lost: what it asks for would not be verified."""
        if self.running is not None and not self.running.is_credit:
            self.running = None

    def judge(self, pays: Callable[[int], bool]) -> None:
        """Note whether drafts of some width pay, now that those of a check were verified."""
        check = self._check
        if check is None or not check.judged:
            return
        if pays(check.width):
            if self.running is not check:  # else it has yet to be measured warm
                self._check, self._n_vain, self._wait = None, 0, 0.0
            return
        self._check, self._n_vain = None, self._n_vain + 1
        self._wait = min(MOST_PROBES, VAIN_WAIT**self._n_vain * max(0.0, check.lost + check.expected))
        if self.running is check:
            self.running = None  # what a step of its width takes does not matter

    def earn(self, steps: float) -> None:
        """Count decode time."""
        self._budget.earn(steps)
        self._wait -= PROBE_SHARE * steps

    @property
    def plentiful(self) -> bool:
        """Whether so much is saved up that acceptance may be checked again."""
        return self._budget.balance >= MOST_PROBES / 2

    def pays_for(self, lost: float) -> bool:
        """Take what one step loses from what there is, if it would do for a probe of such steps."""
        if PROBE_STEPS * lost > self._budget.balance:
            return False
        self._budget.gain(-lost)
        return True
