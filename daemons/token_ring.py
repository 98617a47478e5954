"""The token ring: sampled tokens and drafts from the output stage's daemon to the first stage, through shared memory.

The first stage thus starts a step that runs ahead (async scheduling) without waiting for the supervisor (ADR 16).
Order: sampled tokens are sent to the supervisor first, drafts to the first stage first.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from daemons.async_output import PlaceholderFill
from daemons.boundary import RowArrival, RowWait
from daemons.errors import StateError
from lucevisor.protocol.arena import SharedBuffer
from lucevisor.protocol.steps import PENDING, Sampled, Slice, Step, StepResult
from lucevisor.protocol.validation import ids_fault

_HEAD = 2
"""Numbers at the head of a region: the number of sequences, and of tokens for each."""


class TokenRing:
    """One end of the arena for tokens.  ``vocabulary``: number of valid ids; others raise StateError."""

    def __init__(self, arena: SharedBuffer, vocabulary: int) -> None:
        self._arena, self._vocabulary = arena, vocabulary
        self._regions = [arena.region(i).cast("q") for i in range(arena.plan.n_regions)]

    def publish(self, step: Step | None, result: StepResult) -> None:
        """Publish a result's drafts, or the newest token of each sequence of ``step``, to the first stage.

        Tokens of a step that asks for drafts are not published, because the next step starts from the drafts.
        """
        if result.drafts:
            self._write(result.step_id, {one.sequence: list(one.tokens) for one in result.drafts})
        elif step is not None and result.sampled and not any(s.num_draft_tokens for s in step.slices):
            self._write(step.step_id, {one.sequence: [one.token] for one in result.sampled})

    def _write(self, step_id: int, tokens: Mapping[int, list[int]]) -> None:
        width = max(map(len, tokens.values()))
        numbers = array("q", [len(tokens), width, *tokens])
        for own in tokens.values():
            numbers.extend([*own, *own[-1:] * (width - len(own))])  # as Slice.with_drafts fills up
        self._numbers(step_id)[: len(numbers)] = memoryview(numbers)
        self._arena.ring(self._region(step_id), step_id, 8 * len(numbers))

    def wait(self, step_id: int, await_tokens: RowWait) -> float:
        """Wait until the tokens of a step are there; see RowWait."""
        return await_tokens(self._arena, self._region(step_id), step_id, True)

    def read(self, step_id: int) -> dict[int, list[int]]:
        """Return the tokens of each sequence of a step, equally many.  Raises StateError for invalid contents."""
        numbers = self._numbers(step_id)
        n, width = numbers[0], numbers[1]
        if n < 1 or width < 1 or _HEAD + n + n * width > len(numbers):
            raise StateError(f"token ring, step {step_id}", f"{n} sequences of {width} tokens have no room in it")
        tokens = numbers[_HEAD + n : _HEAD + n + n * width].tolist()
        if fault := ids_fault("token", tokens, self._vocabulary):
            raise StateError(f"token ring, step {step_id}", fault)
        sequences = numbers[_HEAD : _HEAD + n].tolist()
        return {sequence: tokens[i * width : (i + 1) * width] for i, sequence in enumerate(sequences)}

    def tokens(self, step_id: int, n: int, width: int) -> Tensor:
        """Return a view of the tokens of a step of ``n`` sequences, int64 [n * width], page-locked if its arena is.

        It is valid until the step one round of regions later.
        """
        region = self._arena.region(self._region(step_id))
        return torch.frombuffer(region, dtype=torch.int64, count=n * width, offset=8 * (_HEAD + n))

    def _region(self, step_id: int) -> int:
        return step_id % self._arena.plan.n_regions

    def _numbers(self, step_id: int) -> memoryview[int]:
        return self._regions[self._region(step_id)]


def zero_placeholders(step: Step) -> Step:
    """Return a step with 0 for its pending tokens and drafts, which only the embedding stage reads."""
    return replace(step, slices=[_zero_placeholders(s) for s in step.slices])


def _zero_placeholders(s: Slice) -> Slice:
    if s.tokens == [PENDING]:
        return replace(s, tokens=[0])
    return replace(s, tokens=[*s.tokens[: s.n_context], *[0] * s.n_drafts]) if s.drafts_pend else s


class RunAheadStep:
    """A step that is launched before its tokens or drafts are known.

    Calling it with the step's metadata, on any device, waits for the tokens and writes them there; then ``tokens`` is
    set.
    """

    def __init__(self, ring: TokenRing | None, step: Step, await_tokens: RowWait | None) -> None:
        if ring is None or await_tokens is None:
            where = f"step {step.step_id}"
            raise StateError(where, "it has pending tokens, and was not posted or there is no arena for them")
        asked = step.depends_on_step or step.drafts_of
        self._ring, self._asked = ring, asked
        self._rows: dict[int, tuple[int, int]] = {}  # by sequence: of the first token to put there, and how many
        self.arrival = RowArrival(lambda: ring.wait(asked, await_tokens))
        self._found: dict[int, list[int]] = {}
        row = 0
        for piece in step.slices:
            if piece.tokens == [PENDING]:
                self._rows[piece.sequence] = row, 1
            elif piece.drafts_pend:
                self._rows[piece.sequence] = row + piece.n_context, piece.n_drafts
            row += len(piece.tokens)
        self.step = zero_placeholders(step)

    def _wait(self) -> dict[int, list[int]]:
        if not self._found:
            self.arrival()
            self._found = self._ring.read(self._asked)
            if missing := [one for one in self._rows if one not in self._found]:
                where = f"step {self.step.step_id}"
                raise StateError(where, f"step {self._asked} has no token for the sequences {missing}")
        return self._found

    def __call__(self, metadata: Tensor) -> None:
        (self.put if metadata.device.type == "cpu" else self.queue)(metadata)

    def put(self, metadata: Tensor) -> None:
        """Wait, and write the tokens to metadata on the cpu."""
        numbers, found = metadata.numpy(), self._wait()
        for sequence, (row, n) in self._rows.items():
            own = found[sequence][:n]
            numbers[row : row + n] = own + own[-1:] * (n - len(own))

    def queue(self, metadata: Tensor) -> None:
        """Wait, and queue copies of the tokens to metadata on any device."""
        expected = [*self._rows], max((n for _, n in self._rows.values()), default=1)
        copies = self._copies(metadata, *expected)  # what takes a while comes before the wait
        found = self._wait()
        if (actual := ([*found], len(next(iter(found.values()))))) != expected:
            copies = self._copies(metadata, *actual)
        for target, source in copies:
            target.copy_(source, non_blocking=True)

    @property
    def tokens(self) -> list[Sampled]:
        """The tokens that were written."""
        return [
            Sampled(one, self._found[one][min(i, len(self._found[one]) - 1)])
            for one, (_, n) in self._rows.items()
            for i in range(n)
        ]

    def _copies(self, metadata: Tensor, sequences: Sequence[int], width: int) -> list[tuple[Tensor, Tensor]]:
        """What to copy where, if the ring has ``width`` tokens for each of the sequences ``sequences``."""
        order = {sequence: i for i, sequence in enumerate(sequences)}
        if not self._rows:  # the supervisor has put others in their place
            return []
        places = [
            (row + i, order[sequence] * width + min(i, width - 1))
            for sequence, (row, n) in self._rows.items()
            if sequence in order
            for i in range(n)
        ]
        return PlaceholderFill.of(self._ring.tokens(self._asked, len(sequences), width), places).onto(metadata)
