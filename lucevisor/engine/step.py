"""Scheduled steps: which requests a step carries, and whether a result answers it.

Records and one check; decides nothing.  Invariant: a result is applied whole or refused whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from lucevisor.engine.sequence import LiveSequence, RequestRecord
from lucevisor.protocol.steps import Sampled, Slice, Step, StepResult


class WrongResult(Exception):
    """A step result that does not answer its step: supervisor and daemons no longer agree on the state."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step to send; ``request_ids[i]`` owns ``step.slices[i]``."""

    step: Step
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A request's slice in a step.  ``live``: its sequence then; by the time of the result it may have another."""

    record: RequestRecord
    live: LiveSequence
    slice: Slice

    @property
    def drafts(self) -> list[int]:
        """The tokens of the slice that are verified."""
        return self.slice.tokens[len(self.slice.tokens) - self.slice.n_drafts :]


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step between plan and result.  ``parts``: by sequence id at the time of the plan."""

    step_id: int
    parts: dict[int, ScheduledSequence]
    decodes: bool


def drawn_tokens(scheduled: ScheduledStep | None, result: StepResult) -> dict[int, list[Sampled]]:
    """Return a result's tokens by sequence id.  Raises WrongResult when they are not those that ``scheduled``, the
    oldest step in flight, asked for.
    """
    if scheduled is None or scheduled.step_id != result.step_id:
        expected = scheduled.step_id if scheduled is not None else "none"
        raise WrongResult(f"a result of step {result.step_id} came; the oldest step in flight is {expected}")
    drawn: dict[int, list[Sampled]] = {}
    for sampled in result.sampled:
        drawn.setdefault(sampled.sequence, []).append(sampled)
    asked = {sequence for sequence, part in scheduled.parts.items() if part.slice.sample}
    if asked != drawn.keys():
        raise WrongResult(
            f"step {result.step_id} asked for tokens of sequences {sorted(asked)}, the result has {sorted(drawn)}"
        )
    for sequence, tokens in drawn.items():
        accepted, drafts = [sampled.token for sampled in tokens[:-1]], scheduled.parts[sequence].drafts
        if accepted != drafts[: len(accepted)]:
            raise WrongResult(f"step {result.step_id} verified {drafts} of sequence {sequence} and accepted {accepted}")
    return drawn
