"""The draft stage behind a pipeline: it gets the steps that pass all stages, and answers with drafts.

Knows the links of no other stage.  Invariant: whatever the draft stage does wrong only detaches it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from lucevisor.engine.pipeline.steps import (
    AttachedDrafter,
    PipelineFailure,
    PipelineStep,
    StageLink,
    filled,
)
from lucevisor.engine.request import ErrorCode
from lucevisor.protocol.codec import encode
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.steps import DraftStep, Sampled, StepResult, tokens_by_sequence


class DraftRelay:
    """Steps to the draft stage, if one is ``attached``, and its answers back.

    ``stage``: its number, behind all stages.  ``in_flight``: the steps that have yet to end.  ``on_drafted`` gets the
    answers; ``on_lost`` is told why the drafter was detached; ``on_known`` is called when steps that were sent without
    their drafts have them, or never will.
    """

    def __init__(
        self,
        stage: int,
        clock: Callable[[], float],
        in_flight: Callable[[], list[PipelineStep]],
        on_known: Callable[[], None],
    ) -> None:
        self._stage, self._clock, self._in_flight, self._on_known = stage, clock, in_flight, on_known
        self.attached: AttachedDrafter | None = None
        self._asked: dict[int, PipelineStep] = {}  # the steps that wait, by id
        self.resting = False  # it gets no steps but those with an ``opening``
        self.on_drafted: Callable[[StepResult], None] = lambda _: None
        self.on_lost: Callable[[PipelineFailure], None] = lambda _: None

    def attach(self, link: StageLink, *, with_output: bool) -> None:
        """Send the steps submitted from now on to a draft stage, too.

        ``with_output``: its daemon is the last stage's, so it gets a step together with it.  It holds no sequences yet.
        Raises RuntimeError if there is one.
        """
        if self.attached is not None:
            raise RuntimeError("a drafter is attached already; detach it first")
        self.attached = AttachedDrafter(link, with_output)

    def detach(self) -> None:
        """Send the drafter nothing more, and ignore its answers.  Does nothing without one."""
        if self.attached is not None:
            self.attached = None
            self._on_known()

    def lose(self, code: ErrorCode, message: str) -> None:
        """Detach the drafter and call ``on_lost``.  Does nothing without one."""
        if self.attached is not None:
            self.detach()
            self.on_lost(PipelineFailure(self._stage, code, message))

    def send(
        self, entry: PipelineStep, *, drawn: list[list[int]] | None = None, before: Sequence[Sampled] = ()
    ) -> None:
        """Send a step to the draft stage that was attached when it was submitted, unless that was detached meanwhile.

        ``drawn``: the tokens sampled for its slices, and ``before``: those of the step it may have run ahead of; None
        if the stage's daemon will know them.
        """
        draft, step = entry.draft, entry.step
        if draft is None or draft is not self.attached:
            return
        if entry.opening is not None:
            step = replace(step, operations=list(entry.opening))
        if drawn is not None:
            step = filled(step, tokens_by_sequence(before))
        try:
            draft.link.send(encode(DraftStep(step, drawn), request_id=step.step_id, flags=self._stage))
        except (ProtocolError, OSError) as error:
            self.lose("shard_lost", f"step {step.step_id} could not be sent to the draft stage: {error}")
        else:
            draft.waiting.append((step.step_id, self._clock()))
            self._asked = {waiting: self._asked[waiting] for waiting, _ in draft.waiting if waiting in self._asked}
            self._asked[step.step_id] = entry

    def asked(self, step_id: int) -> PipelineStep | None:
        """Return a step that the drafter has yet to answer."""
        return self._asked.get(step_id) if self.makes(step_id) else None

    def makes(self, step_id: int) -> bool:
        """Whether the drafter has yet to answer a step."""
        return self.attached is not None and any(waiting == step_id for waiting, _ in self.attached.waiting)

    def take_back(self, step_ids: Collection[int]) -> None:
        """Note that the output stage has given steps back: a draft stage in its daemon drops them, too."""
        draft = self.attached
        if draft is not None and draft.with_output:
            draft.waiting = deque(one for one in draft.waiting if one[0] not in step_ids)

    def receive(self, result: StepResult) -> StageLink | None:
        """Take an answer, for ``pass_on``; return whose it is, None if it is not the one that was due."""
        draft = self.attached
        if draft is None:
            return None  # it was detached, or the pipeline replaced, before it answered
        due, _ = draft.waiting[0] if draft.waiting else (None, 0.0)
        if due != result.step_id:
            expected = "no step" if due is None else f"step {due}"
            self.lose("protocol_error", f"the draft stage answered step {result.step_id} while {expected} was due")
            return None
        draft.waiting.popleft()
        draft.early.append(result)
        return draft.link

    def _put(self, made: StepResult) -> None:
        """Give drafts to the steps that were sent without them: in case that they are sent again."""
        known = {one.sequence: one.tokens for one in made.drafts}
        for entry in [entry for entry in self._in_flight() if entry.step.drafts_of == made.step_id]:
            entry.step = filled(entry.step, known)
        self._on_known()

    def pass_on(self) -> None:
        """Pass the drafts on whose steps have ended: what the output stage answered may wait for a stage before it.

        Steps that verify others have them already, also one that was planned since they were heard.
        """
        while (draft := self.attached) is not None and draft.early:
            if any(entry.step.step_id == draft.early[0].step_id for entry in self._in_flight()):
                for result in draft.early:
                    self._put(result)
                return
            result = draft.early.popleft()
            self._put(result)
            self.on_drafted(result)
