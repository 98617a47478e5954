"""Asynchronous results of a step (async scheduling): the next step is queued before the host has them.

The next step reads tokens and drafts on the device (``PlaceholderFill``), and the host gets an asynchronous copy.
``wait`` completes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lucevisor.protocol.steps import Drafted


def recorded(device: torch.device, *, timed: bool = False) -> torch.cuda.Event:
    """Return an event recorded behind everything queued on the device's current stream."""
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(slots=True, eq=False)
class QueuedStep:
    """A step without a result for the host: at most boundary rows being copied to a region."""

    copied: torch.cuda.Event

    @property
    def ready(self) -> bool:
        """True if the device is done, and ``wait`` of a result returns at once."""
        return bool(self.copied.query())  # type: ignore[no-untyped-call]


@dataclass(slots=True, eq=False)
class AsyncTokens(QueuedStep):
    """Tokens of a step, one per sequence: ``tokens`` int64 [n] on the device, being copied to ``host``.

    ``invalid``: after ``wait``, the sequences whose row of logits was not ``valid``.
    """

    sequences: list[int]
    tokens: Tensor
    host: Tensor
    invalid: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, sequences: Sequence[int], tokens: Tensor, valid: Tensor | None = None) -> AsyncTokens:
        """Start the copy to the host, where invalid tokens are negative."""
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens if valid is None else torch.where(valid, tokens, ~tokens), non_blocking=True)
        return cls(recorded(tokens.device), [*sequences], tokens, host)

    def wait(self) -> dict[int, int]:
        """Wait for the device; return the tokens by sequence."""
        self.copied.synchronize()
        found = self.host.tolist()
        self.invalid = [sequence for sequence, token in zip(self.sequences, found, strict=True) if token < 0]
        tokens = [~token if token < 0 else token for token in found]
        return dict(zip(self.sequences, tokens, strict=True))


@dataclass(slots=True, eq=False)
class AsyncDrafts(QueuedStep):
    """Drafts of equal length: ``tokens`` int64 [B, n] on the device, valid until the next ones.

    They are being copied to the host with their probabilities.
    """

    sequences: list[int]
    tokens: Tensor
    host: tuple[Tensor, Tensor]
    began: torch.cuda.Event

    @classmethod
    def of(
        cls, sequences: Sequence[int], tokens: Tensor, probabilities: Tensor, began: torch.cuda.Event
    ) -> AsyncDrafts:
        """Start the copies to the host."""
        locked = tokens.device.type != "cpu"
        ids, chances = (torch.empty(x.shape, dtype=x.dtype, pin_memory=locked) for x in (tokens, probabilities))
        ids.copy_(tokens, non_blocking=True)
        chances.copy_(probabilities, non_blocking=True)
        return cls(recorded(tokens.device, timed=True), [*sequences], tokens, (ids, chances), began)

    @property
    def seconds(self) -> float:
        """Seconds that the device took, after ``wait``."""
        return float(self.began.elapsed_time(self.copied)) / 1e3

    def wait(self) -> list[Drafted]:
        """Wait for the device."""
        self.copied.synchronize()
        tokens, probabilities = (x.tolist() for x in self.host)
        return [Drafted(*one) for one in zip(self.sequences, tokens, probabilities, strict=True)]


@dataclass(frozen=True, slots=True)
class PlaceholderFill:
    """Copies tokens that only the device has into a step's metadata, whose number i is the id of row i.

    ``runs``: first row, first token and length of each run of consecutive rows.
    """

    tokens: Tensor
    runs: list[tuple[int, int, int]]

    @classmethod
    def of(cls, tokens: Tensor, places: Sequence[tuple[int, int]]) -> PlaceholderFill:
        """Make the runs of ``places``: pairs of a row and the index of its token, rows ascending."""
        runs: list[tuple[int, int, int]] = []
        for row, at in places:
            if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (row, at):
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((row, at, 1))
        return cls(tokens, runs)

    def onto(self, metadata: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the copies to make, as pairs of target and source."""
        return [(metadata[row : row + n], self.tokens[at : at + n]) for row, at, n in self.runs]

    def __call__(self, metadata: Tensor) -> None:
        for target, source in self.onto(metadata):
            target.copy_(source, non_blocking=True)
