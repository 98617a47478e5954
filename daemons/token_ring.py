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
        numbers = array("q", [len(newest), *newest, *newest.values()])
        self._numbers(step.region)[: len(numbers)] = memoryview(numbers)
        self._arena.bells.ring(step.region, step.step_id)

    def wait(self, step_id: int, await_tokens: RowWait) -> float:
        """Wait until the tokens of a step are there; see RowWait."""
        return await_tokens(self._arena.bells, step_id % self._arena.plan.n_regions, step_id)

    def read(self, step_id: int) -> tuple[list[int], list[int]]:
        """The sequences of a step, and their newest tokens."""
        numbers = self._numbers(step_id % self._arena.plan.n_regions)
        n = numbers[0]
        return numbers[1 : 1 + n].tolist(), numbers[1 + n : 1 + 2 * n].tolist()

    def tokens(self, step_id: int, n: int) -> Tensor:
        """Where the tokens of a step of ``n`` sequences lie, int64 [n]: page-locked as its arena is.

        They stay there until a step comes that is a whole round of regions later.
        """
        region = self._arena.region(step_id % self._arena.plan.n_regions)
        return torch.frombuffer(region, dtype=torch.int64, count=n, offset=8 * (1 + n))

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
        self._sequences: list[int] = []
        self.arrival = Arrival(lambda: ring.wait(step.follows, await_tokens))
        self.tokens: list[Sampled] = []
        self._rows: list[int] = []  # of their tokens
        row = 0
        for piece in step.slices:
            if piece.tokens == [PENDING]:
                self._rows.append(row)
                self._sequences.append(piece.sequence)
            row += len(piece.tokens)
        self.step = without_tokens(step)

    def __call__(self, metadata: Tensor) -> None:
        n = len(self._rows)
        copies = Fill.of(self._ring.tokens(self._follows, n), [*zip(self._rows, range(n), strict=True)]).onto(metadata)
        if not self.tokens:
            self.arrival()
        sequences, tokens = self._ring.read(self._follows)
        if sequences != self._sequences:  # of others, too
            if missing := [one for one in self._sequences if one not in sequences]:
                where = f"step {self.step.step_id}"
                raise StateError(where, f"step {self._follows} sampled no token of the sequences {missing}")
            at = [sequences.index(one) for one in self._sequences]
            places, tokens = [*zip(self._rows, at, strict=True)], [tokens[i] for i in at]
            copies = Fill.of(self._ring.tokens(self._follows, len(sequences)), places).onto(metadata)
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        self.tokens = [*map(Sampled, self._sequences, tokens)]
