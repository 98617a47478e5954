"""Tokens that the output stage sampled, on their way to the first stage through shared memory.

The first stage starts a step that runs ahead with them, without waiting for the supervisor (ADR 16).  Knows regions and
doorbells; no layers.  Invariant: the supervisor was told of a step's tokens before the first stage is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from daemons.boundary import Arrival, RowWait
from daemons.deferred import Fill
from daemons.errors import StateError
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.steps import PENDING, Sampled, Step


class TokenRing:
    """One end of the arena for tokens."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def tell(self, step: Step, sampled: Sequence[Sampled]) -> None:
        """Hand the newest token of each sequence of a step to the first stage."""
        newest = {one.sequence: one.token for one in sampled}
        numbers = array("q", [len(newest), *(number for pair in newest.items() for number in pair)])
        self._numbers(step.region)[: len(numbers)] = memoryview(numbers)
        self._arena.bells.ring(step.region, step.step_id)

    def wait(self, step_id: int, await_tokens: RowWait) -> float:
        """Wait until the tokens of a step are there; see RowWait."""
        return await_tokens(self._arena.bells, step_id % self._arena.plan.n_regions, step_id)

    def read(self, step_id: int) -> dict[int, int]:
        """The newest tokens of a step by sequence."""
        numbers = self._numbers(step_id % self._arena.plan.n_regions)
        n = numbers[0]
        return dict(zip(numbers[1 : 2 * n : 2].tolist(), numbers[2 : 2 * n + 1 : 2].tolist(), strict=True))

    def _numbers(self, region: int) -> memoryview[int]:
        return self._arena.region(region).cast("q")


def without_tokens(step: Step) -> Step:
    """Return a step with 0 for its pending tokens, which stages that embed nothing need not know."""
    return replace(step, slices=[replace(s, tokens=[0]) if s.tokens == [PENDING] else s for s in step.slices])


class FollowingStep:
    """A step whose pending tokens the output stage samples meanwhile; ``step`` has 0 in their places.

    Called with the step's metadata, on any device, it waits and puts them there; ``tokens`` are known then.
    """

    def __init__(self, ring: TokenRing | None, step: Step, await_tokens: RowWait | None) -> None:
        if ring is None or await_tokens is None:
            where = f"step {step.step_id}"
            raise StateError(where, "it has pending tokens, and was not posted or there is no arena for them")
        self._ring, self._follows = ring, step.follows
        self.arrival = Arrival(lambda: ring.wait(step.follows, await_tokens))
        self.tokens: list[Sampled] = []
        self._places: list[tuple[int, int]] = []  # (row, sequence)
        row = 0
        for piece in step.slices:
            if piece.tokens == [PENDING]:
                self._places.append((row, piece.sequence))
            row += len(piece.tokens)
        self.step = without_tokens(step)

    def __call__(self, metadata: Tensor) -> None:
        if not self.tokens:
            self.arrival()
            newest = self._ring.read(self._follows)
            if missing := [sequence for _, sequence in self._places if sequence not in newest]:
                where = f"step {self.step.step_id}"
                raise StateError(where, f"step {self._follows} sampled no token of the sequences {missing}")
            self.tokens = [Sampled(sequence, newest[sequence]) for _, sequence in self._places]
        tokens = torch.tensor([one.token for one in self.tokens], dtype=metadata.dtype)
        if metadata.device.type != "cpu":
            tokens = tokens.pin_memory()
        Fill.of(tokens, [(row, at) for at, (row, _) in enumerate(self._places)])(metadata)
