"""What speculation may lose: a share of decode time, saved up to a limit and spent by drafts that do not pay off.

Pure; counts in plain decode steps.  Invariant: over any stretch, no more is lost than was saved up before and earned in
it, but for the step that overdraws the balance.
"""

from __future__ import annotations

from typing import Final

LOSS_SHARE: Final = 0.015
"""Of decode time that drafting may lose against plain decoding, over what it gained."""
FIRST_LOSS: Final = 8.0
"""Plain steps that drafting may lose before it saved any: these and 1.5 % are less than 2 % of 2,000 steps."""
MOST_LOSS: Final = 24.0
"""Plain steps that it may lose of what it saved or was granted before: a machine that is disturbed for a moment, or one
answer that is hard to draft, does not end what pays."""
RESUME_SHARE: Final = 0.25
"""Of what there was at first, to be earned before drafts go on after all was lost: some rounds in a row, not one."""
UPKEEP_SHARE: Final = LOSS_SHARE / 2
"""Of decode time that the drafter's upkeep is charged at most: no decision avoids it, and drafts must be tried again
whatever it is.
"""
PROBE_SHARE: Final = 0.01
"""Of decode time for probes: steps of a width that is not the best known one, to measure it."""
MOST_PROBES: Final = 6.0
"""Plain steps of saved-up probe budget: enough for a probe of any width at the start."""


class Allowance:
    """Plain steps that may be lost: ``first``, and a share of the time, saved up to ``most``; ``balance`` is what is
    left.
    """

    def __init__(self, share: float, first: float, most: float) -> None:
        self._share, self._most, self._resume = share, most, RESUME_SHARE * first
        self.balance = first
        self.spent = False  # nothing was left, and RESUME_SHARE was not earned yet

    @classmethod
    def for_losses(cls) -> Allowance:
        """What drafting may lose."""
        return cls(LOSS_SHARE, FIRST_LOSS, MOST_LOSS)

    @classmethod
    def for_probes(cls) -> Allowance:
        """What probes may cost."""
        return cls(PROBE_SHARE, MOST_PROBES, MOST_PROBES)

    def earn(self, steps: float) -> None:
        """Count decode time."""
        self.gain(self._share * steps)

    def gain(self, steps: float) -> None:
        """Count what was saved, or lost if negative."""
        self.balance = min(self._most, self.balance + steps)
        self.spent = self.balance < (self._resume if self.spent else 0.0)
