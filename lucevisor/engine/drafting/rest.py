"""When a drafter that does not pay rests, and when it is tried again.

A drafter that is not asked still costs: its context follows every step, and prompts go through its layers before the
first decode.  While it rests it gets no steps at all, so decoding is as fast as without one.

Pure; counts in steps of decodes.
"""

from __future__ import annotations

from typing import Final

AWAKE_STEPS: Final = 128
"""Steps without drafts, but for probes, after which it rests: on text that can be drafted again it is asked within 50
to 150."""
REST_STEPS: Final = 1024
"""Steps for which it rests at first: what it costs awake, up to a tenth where steps are fast, stays near a percent."""
MOST_REST_STEPS: Final = 8192
"""The same at most: each time that it was woken for nothing it rests twice as long."""
PAID_STEPS: Final = 64
"""Steps for which it is asked while awake, after which it counts as one that pays on some texts: a useless one is
stopped sooner."""
PAID_REST_STEPS: Final = AWAKE_STEPS
"""Steps for which such a drafter rests at first, or until a request comes while nothing is decoded."""
RESTING: Final = "the drafter rests, because plain decoding is faster; it is tried again now and then"


class DrafterRest:
    """Whether the drafter rests."""

    def __init__(self) -> None:
        self.resting = False
        self._paid = False  # before it rested
        self._n_steps = 0  # since it was asked, woken or let rest
        self._asked = False  # since the last step
        self._n_asked = 0  # steps since it was woken for which it was
        self._rest_steps = REST_STEPS

    def due(self, *, idle: bool) -> bool:
        """Whether it is to be woken, or to rest if the policy wants no drafts.

        ``idle``: nothing is decoded.  What comes next may be drafted well, and has nothing that it missed.
        """
        if idle and self.resting and self._paid:
            return True
        return self._n_steps >= (self._rest_steps if self.resting else AWAKE_STEPS)

    def turn(self) -> None:
        """It rests from now on, or was woken."""
        self.resting, self._n_steps = not self.resting, 0
        if not self.resting:  # in vain, until it is asked
            self._rest_steps, self._n_asked = min(2 * self._rest_steps, MOST_REST_STEPS), 0
            return
        self._paid = self._n_asked >= PAID_STEPS
        if self._n_asked:
            self._rest_steps = PAID_REST_STEPS if self._paid else REST_STEPS

    def stepped(self) -> None:
        """Count a step of decodes."""
        self._n_steps += 1
        self._n_asked += self._asked
        self._asked = False

    def asked(self) -> None:
        """Drafts are asked for that are no probe, of a slice."""
        self._n_steps, self._asked = 0, True

    def end(self) -> None:
        """It is another drafter, or the same one attached again."""
        self.resting = self._paid = self._asked = False
        self._n_steps = self._n_asked = 0
