"""Choices of how many drafts to ask for, and when they are made again.  Pure; speculation.py makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

CHOICE_STEPS: Final = 8
"""Steps for which a choice holds: choosing takes 0.1 ms, and estimates move slowly."""
EAGER_STEPS: Final = 64
"""Steps at the start, each with a choice of its own."""


@dataclass(frozen=True, slots=True)
class WidthChoice:
    """Drafts to ask for, and the best known tokens a second.  ``own``: by request, where widths are unequal."""

    width: int
    rate: float
    chosen_at: int
    own: dict[str, int] = field(default_factory=dict)


class WidthChoices:
    """The choice for each number of slices.

    ``renew_at``, in steps that were measured: choices made before are made again; ``renew``: so is the next one,
    whenever the last one was made.
    """

    def __init__(self) -> None:
        self.renew_at, self.renew = 0, False
        self._made: dict[int, WidthChoice] = {}
        self._lone_at = -1  # when drafts were last asked for behind a lone slice

    def asked(self, n_slices: int, now: int) -> WidthChoice | None:
        """The choice by which drafts are asked for; None if one has to be made first.

        That of a lone slice is made again when its next step was sent (``lone_is_due``): its rounds are short.
        """
        if n_slices == 1:
            self._lone_at = now
        due = self.renew or (n_slices > 1 and self._due(n_slices, now))
        return None if due else self._made.get(n_slices)

    def lone_is_due(self, now: int, oldest: int) -> bool:
        """Whether the choice for a lone slice is to be made again, if drafts were asked for since ``oldest``."""
        return self._lone_at >= oldest and self._due(1, now)

    def _due(self, n_slices: int, now: int) -> bool:
        choice, hold = self._made.get(n_slices), CHOICE_STEPS if now > EAGER_STEPS else 1
        return choice is not None and (now >= choice.chosen_at + hold or choice.chosen_at < self.renew_at)

    def get(self, n_slices: int) -> WidthChoice | None:
        """The last choice."""
        return self._made.get(n_slices)

    def keep(self, n_slices: int, choice: WidthChoice) -> WidthChoice:
        """Keep a choice that was made."""
        self._made[n_slices], self.renew = choice, False
        return choice

    @property
    def latest(self) -> WidthChoice:
        """The choice that was made last."""
        return max(self._made.values(), key=lambda choice: choice.chosen_at, default=WidthChoice(0, 0.0, 0))
