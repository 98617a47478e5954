"""Output of a step of a stage: the result for the supervisor, and arrays sent as its payload."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from daemons.async_output import AsyncDrafts, QueuedStep
from daemons.boundary import BoundaryBuffer
from lucevisor.protocol.steps import Drafted, DraftStep, Step, StepResult


@dataclass(slots=True)
class Payload:
    """Float32 arrays on the cpu, with their names and shapes as in StepResult."""

    arrays: list[Tensor] = field(default_factory=list)
    segments: list[tuple[str, list[int]]] = field(default_factory=list)

    def add(self, name: str, array: Tensor) -> None:
        """Append an array."""
        self.arrays.append(array)
        self.segments.append((name, list(array.shape)))


@dataclass(slots=True)
class StepOutput:
    """A step result and its payload, float32 arrays.

    ``async_output``: tokens, drafts or rows of ``step`` that ``ModelRunner.finish_step`` waits for.  ``written``: the
    boundaries that the step's rows are being copied to, to be rung then.  ``started``: when its boundary rows had
    arrived.
    """

    result: StepResult
    payload: list[Tensor]
    async_output: QueuedStep | None = None
    step: Step | None = None
    started: float = 0.0
    written: Sequence[BoundaryBuffer] = ()

    @property
    def is_drafting(self) -> bool:
        """True if the device makes drafts that nobody waits for here."""
        return isinstance(self.async_output, AsyncDrafts)

    @classmethod
    def of_drafts(
        cls, asked: DraftStep, stage: int, drafts: list[Drafted] | AsyncDrafts, wait_s: float, started: float,
        *, cold: bool = False,
    ) -> StepOutput:  # fmt: skip
        """Return the output of the draft stage; ``cold`` as in StepResult."""
        async_output = drafts if isinstance(drafts, AsyncDrafts) else None
        known, seconds = [] if isinstance(drafts, AsyncDrafts) else drafts, time.monotonic() - started
        result = StepResult(asked.step.step_id, stage, [], seconds, wait_s, drafts=known, cold=cold)
        return cls(result, [], async_output, started=started)
