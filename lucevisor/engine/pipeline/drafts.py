"""The draft stage behind a pipeline: it gets the steps that pass all stages, and answers with drafts.

A base class of the pipeline (pipeline.py), which sets the attributes declared here.
Invariant: whatever the draft stage does wrong only detaches it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from lucevisor.engine.pipeline.steps import AttachedDrafter, PipelineFailure, PipelineStep, StageLink, filled
from lucevisor.engine.request import ErrorCode
from lucevisor.protocol.codec import encode
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.steps import DraftStep, Sampled, StepResult


class DraftRelay:
    """The pipeline's side of drafting."""

    on_drafted: Callable[[StepResult], None]
    on_drafter_lost: Callable[[PipelineFailure], None]
    _links: list[StageLink]
    _at_stage: list[deque[PipelineStep]]
    _clock: Callable[[], float]
    _draft: AttachedDrafter | None
    _answered_at: dict[int, float]
    _sampled: Sequence[Sampled]

    @property
    def n_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self._links)

    def attach_drafter(self, link: StageLink, *, with_output: bool) -> None:
        """Send the steps submitted from now on to a draft stage, too, whose number is ``n_stages``.

        ``with_output``: its daemon is the last stage's, so it gets a step together with it.  It holds no sequences yet.
        Raises RuntimeError if there is one.
        """
        if self._draft is not None:
            raise RuntimeError("a drafter is attached already; detach it first")
        self._draft = AttachedDrafter(link, with_output)

    def detach_drafter(self) -> None:
        """Send the drafter nothing more, and ignore its answers.  Does nothing without one."""
        self._draft = None

    def lose_drafter(self, code: ErrorCode, message: str) -> None:
        """Detach the drafter and call ``on_drafter_lost``.  Does nothing without one."""
        if self._draft is not None:
            self._draft = None
            self.on_drafter_lost(PipelineFailure(self.n_stages, code, message))

    # ---- inside

    def _send_draft(self, entry: PipelineStep, tokens: list[list[int]] | None) -> None:
        """Send a step to the draft stage, unless that was detached meanwhile."""
        draft, step = entry.draft, entry.step
        if draft is None or draft is not self._draft:
            return
        if entry.opening is not None:
            step = replace(step, operations=list(entry.opening))
        if tokens is not None:
            step = filled(step, self._sampled)
        try:
            draft.link.send(encode(DraftStep(step, tokens), request_id=step.step_id, flags=self.n_stages))
        except (ProtocolError, OSError) as error:
            self.lose_drafter("shard_lost", f"step {step.step_id} could not be sent to the draft stage: {error}")
        else:
            draft.waiting.append((step.step_id, self._clock()))

    def _take_drafts_back(self, step_ids: Collection[int]) -> None:
        """Note that the output stage has given steps back: a draft stage in its daemon drops them, too."""
        draft = self._draft
        if draft is not None and draft.with_output:
            draft.waiting = deque(one for one in draft.waiting if one[0] not in step_ids)

    def _receive_drafts(self, result: StepResult, now: float) -> None:
        draft = self._draft
        if draft is None:
            return  # it was detached, or the pipeline replaced, before it answered
        due, _ = draft.waiting[0] if draft.waiting else (None, 0.0)
        if due != result.step_id:
            expected = "no step" if due is None else f"step {due}"
            text = f"the draft stage answered step {result.step_id} while {expected} was due"
            self.lose_drafter("protocol_error", text)
            return
        draft.waiting.popleft()
        self._answered_at[id(draft.link)] = now
        draft.early.append(result)
        self._pass_drafts_on()

    def _pass_drafts_on(self) -> None:
        """Pass the drafts on whose steps have ended: what the output stage answered may wait for a stage before it."""
        while (draft := self._draft) is not None and draft.early and not self._is_on_its_way(draft.early[0].step_id):
            self.on_drafted(draft.early.popleft())

    def _is_on_its_way(self, step_id: int) -> bool:
        """Whether a step has yet to end."""
        return any(entry.step.step_id == step_id for waiting in self._at_stage for entry in waiting)
