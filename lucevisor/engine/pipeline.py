"""Pipeline parallelism: sends a step to its first stage, and on to the next when a stage has answered.

Pure: what is to be sent goes to ``out``, what became of steps to ``outcomes``. With doorbells steps are posted: sent to
all stages at once (ADR 21). A draft stage after the last one gets the steps submitted since it was attached, unless it
is suspended. When a daemon is lost, its steps wait until another daemon runs its stages. Invariant: a stage answers its
steps in the order they were sent to it; any other answer fails the pipeline, one of the draft stage only detaches it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from lucevisor.engine.constraint import MadeMasks
from lucevisor.engine.request import ErrorCode
from lucevisor.protocol.errors import LocalProtocolError
from lucevisor.protocol.frames import POSTED, encode
from lucevisor.protocol.steps import (
    PENDING,
    DraftStep,
    Masks,
    Operation,
    PendingCancelled,
    Sampled,
    Step,
    StepResult,
    tokens_by_sequence,
)


class SendFrame(msgspec.Struct, frozen=True, gc=False):
    """Instruction: send an encoded frame to the daemon of a stage, or of the draft stage after the last one."""

    stage: int
    step_id: int
    frame: bytes


Embeddings = Mapping[int, Sequence[memoryview]]
"""Embedding rows of images in a step's slices, by sequence, for the first stage."""
NO_EMBEDDINGS: Embeddings = MappingProxyType({})


def with_embeddings(step: Step, flags: int, embeddings: Embeddings) -> bytes:
    """Return the frame of a step, with the rows of images in its slices as payload."""
    parts = [part for slice_ in step.slices for part in embeddings.get(slice_.sequence, ())]
    head = encode(step, request_id=step.step_id, flags=flags, payload_bytes=sum(map(len, parts)))
    return b"".join((head, *parts)) if parts else head


class SendMasks(msgspec.Struct, frozen=True, gc=False):
    """Instruction: send the masks of a step to the output stage's daemon."""

    stage: int
    message: Masks
    payload: Sequence[bytearray]


class SendCancelPending(msgspec.Struct, frozen=True, gc=False):
    """Instruction: have a stage give back the posted steps that it has not begun."""

    stage: int


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """A step that the last stage has answered, with the results and payloads of every stage, in order. ``seconds``:
    from submit to the last answer."""

    step: Step
    results: tuple[StepResult, ...]
    payloads: tuple[memoryview, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class StageFailure:
    """Reason for a pipeline's failure, and the stage whose daemon caused it."""

    stage: int
    code: ErrorCode
    message: str


class RowsReady(msgspec.Struct, frozen=True, gc=False):
    """Outcome: the rows that a stage made of a step are there for the next one."""

    step: Step
    stage: int


class FirstStageDone(msgspec.Struct, frozen=True, gc=False):
    """Outcome: the first of several stages has answered a step."""


class StepsReturned(msgspec.Struct, frozen=True, gc=False):
    """Outcome: a stage has given posted steps back."""


class StageRebuilt(msgspec.Struct, frozen=True, gc=False):
    """Outcome: a stage has answered a step that rebuilds it."""

    stage: int


class DraftsAnswered(msgspec.Struct, frozen=True, gc=False):
    """Outcome: the draft stage has answered a step that has ended."""

    result: StepResult


class DrafterDetached(msgspec.Struct, frozen=True, gc=False):
    """Outcome: the drafter was detached because of a failure."""

    failure: StageFailure


Outcome = (
    PipelineResult
    | StageFailure
    | RowsReady
    | FirstStageDone
    | StepsReturned
    | StageRebuilt
    | DraftsAnswered
    | DrafterDetached
)
"""What became of steps; nothing follows a StageFailure."""

Sends = SendFrame | SendMasks | SendCancelPending


@dataclass(frozen=True, slots=True)
class OldestStep:
    """The step a stage has worked on for longest.  ``elapsed_s`` counts from when its daemon was free to begin."""

    step_id: int
    stage: int
    elapsed_s: float


class Answer(NamedTuple):
    """Answer of a stage; ``payload`` holds the arrays that ``result.segments`` describe."""

    result: StepResult
    payload: memoryview


@dataclass(slots=True, eq=False)
class AttachedDrafter:
    """The draft stage. ``with_output``: in the output stage's daemon. ``waiting``: (step id, send time) of unanswered
    steps. ``early``: answers received before their steps ended."""

    daemon: int
    with_output: bool
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    early: deque[StepResult] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class PipelineStep:
    """A step in flight at ``stage``. ``draft``: the draft stage that gets it, with ``draft_operations`` in place of its
    own."""

    step: Step
    stage: int
    started_at: float
    sent_at: float  # when it reached its present stage
    draft: AttachedDrafter | None = None
    draft_operations: Sequence[Operation] | None = None
    sent_to: set[int] = field(default_factory=set)  # stages that it was sent to and that are not lost
    posted: set[int] = field(default_factory=set)  # those it was sent to before the previous stage had answered
    done: set[int] = field(default_factory=set)  # stages that have applied its operations, and get it without them
    early: dict[int, Answer] = field(default_factory=dict)  # answers of stages after the present one
    answers: list[Answer] = field(default_factory=list)
    embeddings: Embeddings = field(default_factory=dict)
    depends_on_step: int = (
        0  # the step whose tokens it starts from; ``step.depends_on_step`` is 0 as soon as they are known
    )

    def __post_init__(self) -> None:
        self.depends_on_step = self.step.depends_on_step

    def lose(self, stage: int) -> None:
        """Record that a stage lost the step before answering it."""
        self.sent_to.discard(stage)
        self.posted.discard(stage)

    def drawn(self) -> list[list[int]]:
        """Return the tokens that the last stage sampled for each slice."""
        tokens = tokens_by_sequence(self.answers[-1].result.sampled)
        return [tokens.get(slice_.sequence, []) for slice_ in self.step.slices]

    def frame(self, stage: int, *, posted: bool) -> bytes:
        step = replace(self.step, operations=[]) if stage in self.done else self.step
        return with_embeddings(step, stage | POSTED if posted else stage, NO_EMBEDDINGS if stage else self.embeddings)


def replace_placeholders(step: Step, known: Mapping[int, Sequence[int]]) -> Step:
    """Return a step with ``known`` tokens and drafts, by sequence, in place of placeholders; missing drafts
    are padded."""
    slices = []
    for slice_ in step.slices:
        if slice_.tokens == [PENDING]:
            slice_ = replace(slice_, tokens=[known[slice_.sequence][-1]])
        elif slice_.drafts_pend:
            slice_ = slice_.with_drafts(known.get(slice_.sequence, ()))
        slices.append(slice_)
    return replace(step, slices=slices, depends_on_step=0, drafts_of=0)


def matches_sampled(step: Step, before: Sequence[Sampled]) -> bool:
    """Return whether the decodes of a step start from the tokens that the step ``before`` sampled."""
    newest = {sampled.sequence: sampled.token for sampled in before}
    return all(newest.get(slice_.sequence, slice_.tokens[0]) == slice_.tokens[0] for slice_ in step.slices)


class DraftRelay:
    """Sends the steps of a pipeline to the draft stage, ``stage``, if one is ``attached``, and receives its answers."""

    def __init__(self, stage: int, pipeline: Pipeline) -> None:
        self._stage, self._pipeline = stage, pipeline
        self.attached: AttachedDrafter | None = None
        self._unanswered: dict[int, PipelineStep] = {}  # the steps that wait, by id
        self.suspended = False  # it gets no steps but those with ``draft_operations``

    def attach(self, daemon: int, *, with_output: bool) -> None:
        """Send the steps submitted from now on to a draft stage that holds no sequences, too."""
        self.attached = AttachedDrafter(daemon, with_output)

    def detach(self) -> None:
        """Stop sending steps to the drafter, and ignore its answers."""
        if self.attached is not None:
            self.attached = None
            self._pipeline.send_known_steps()

    def lose(self, code: ErrorCode, message: str) -> None:
        """Detach the drafter because of a failure."""
        if self.attached is not None:
            self.detach()
            self._pipeline.outcomes.append(DrafterDetached(StageFailure(self._stage, code, message)))

    def send(
        self, entry: PipelineStep, *, drawn: list[list[int]] | None = None, before: Sequence[Sampled] = ()
    ) -> None:
        """Send a step to the draft stage that was attached when it was submitted. ``drawn``: the tokens sampled for its
        slices, and ``before``: those of the step it may have run ahead of; None if the stage's daemon will have them.
        """
        draft, step = entry.draft, entry.step
        if draft is None or draft is not self.attached:
            return
        if entry.draft_operations is not None:
            step = replace(step, operations=list(entry.draft_operations))
        if drawn is not None:
            step = replace_placeholders(step, tokens_by_sequence(before))
        try:
            frame = encode(DraftStep(step, drawn), request_id=step.step_id, flags=self._stage)
        except LocalProtocolError as error:
            self.lose("protocol_error", f"step {step.step_id} cannot be sent to the draft stage: {error}")
            return
        self._pipeline.out.append(SendFrame(self._stage, step.step_id, frame))
        draft.waiting.append((step.step_id, self._pipeline.now))
        self._unanswered = {
            waiting: self._unanswered[waiting] for waiting, _ in draft.waiting if waiting in self._unanswered
        }
        self._unanswered[step.step_id] = entry

    def find_unanswered(self, step_id: int) -> PipelineStep | None:
        """Return a step that the drafter has yet to answer."""
        return self._unanswered.get(step_id) if self.is_drafting(step_id) else None

    def is_drafting(self, step_id: int) -> bool:
        """Return whether the drafter has yet to answer a step."""
        return self.attached is not None and any(waiting == step_id for waiting, _ in self.attached.waiting)

    def receive(self, result: StepResult) -> int | None:
        """Store an answer for ``deliver_drafts``; return the drafter's daemon, None if another answer was due."""
        draft = self.attached
        if draft is None:
            return None  # it was detached before it answered
        due, _ = draft.waiting[0] if draft.waiting else (None, 0.0)
        if due != result.step_id:
            expected = "no step" if due is None else f"step {due}"
            self.lose("protocol_error", f"the draft stage answered step {result.step_id} while {expected} was due")
            return None
        draft.waiting.popleft()
        draft.early.append(result)
        return draft.daemon

    def _fill_in_drafts(self, made: StepResult) -> None:
        """Fill drafts into steps that were sent without them, in case they are sent again."""
        known = {drafted.sequence: drafted.tokens for drafted in made.drafts}
        for entry in [entry for entry in self._pipeline.in_flight if entry.step.drafts_of == made.step_id]:
            entry.step = replace_placeholders(entry.step, known)
        self._pipeline.send_known_steps()

    def deliver_drafts(self) -> None:
        """Report the drafts whose steps have ended; those of unfinished steps are only filled into steps."""
        while (draft := self.attached) is not None and draft.early:
            if any(entry.step.step_id == draft.early[0].step_id for entry in self._pipeline.in_flight):
                for result in draft.early:
                    self._fill_in_drafts(result)
                return
            result = draft.early.popleft()
            self._fill_in_drafts(result)
            self._pipeline.outcomes.append(DraftsAnswered(result))


NO_PAYLOAD = memoryview(b"")


class Pipeline:
    """Steps in flight through the stages, ``daemons`` by stage (one may run several), which hold no sequences at first.
    ``has_doorbells``: each has a daemon of its own and a doorbell to the next one. The owner sets ``now`` before each
    call."""

    def __init__(self, daemons: Sequence[int], out: MutableSequence[Any], *, has_doorbells: bool = False) -> None:
        self.out = out
        self.outcomes: deque[Outcome] = deque()
        self.now = 0.0
        self._daemons = list(daemons)
        self.has_doorbells = has_doorbells
        self._at_stage: list[deque[PipelineStep]] = [deque() for _ in daemons]  # in order of arrival
        self._unanswered: list[deque[PipelineStep]] = [deque() for _ in daemons]  # by its daemon, in sending order
        self._cancelling: set[int] = set()  # stages that have yet to answer CancelPending
        self._answered_at: dict[int, float] = {}  # by daemon, which has one compute thread for all its stages
        self._open = True
        self.lost: set[int] = set()  # stages whose daemon is lost: steps wait for them
        self._rebuilding: dict[tuple[int, int], tuple[int, float]] = {}  # by (stage, step id): daemon, when it was sent
        self.drafts = DraftRelay(len(daemons), self)
        self._sampled: Sequence[Sampled] = ()  # tokens of the step that the last stage answered last

    @property
    def n_stages(self) -> int:
        """Stages, the draft stage not counted."""
        return len(self._daemons)

    @property
    def in_flight(self) -> list[PipelineStep]:
        """Steps that the last stage has not answered."""
        return [entry for waiting in self._at_stage for entry in waiting]

    def submit(
        self,
        step: Step,
        draft_operations: Sequence[Operation] | None = None,
        embeddings: Embeddings = NO_EMBEDDINGS,
    ) -> None:
        """Send a step to the first stage and the draft stage; that gets ``draft_operations`` in place of the step's
        own, and nothing else while it is suspended. ``embeddings``: of the images in its slices."""
        if not self._open:
            return
        draft = None if self.drafts.suspended and draft_operations is None else self.drafts.attached
        entry = PipelineStep(step, 0, self.now, self.now, draft, draft_operations, embeddings=embeddings)
        self._at_stage[0].append(entry)
        has_others = all(0 in before.sent_to for before in self._at_stage[0] if before is not entry)
        if has_others and self._send(entry, 0, posted=self.n_stages > 1 and step.waits_for_tokens):
            for stage in range(1, self.n_stages):
                if not self._may_post(entry, stage) or not self._send(entry, stage, posted=True):
                    return

    def send_masks(self, made: MadeMasks) -> None:
        """Send the masks of a submitted step to the output stage, unless that is lost: who runs it next gets them
        again."""
        stage = self.n_stages - 1
        if self._open and stage not in self.lost:
            self.out.append(SendMasks(stage, made.message, made.payload))

    def receive(self, result: StepResult | PendingCancelled, payload: memoryview = NO_PAYLOAD) -> None:
        """Take a stage's answer: send the step on, or report its result when the stage was the last."""
        if not self._open:
            return
        if isinstance(result, PendingCancelled):
            self._on_pending_cancelled(result)
            return
        stage = result.stage
        if stage == self.n_stages:
            if (daemon := self.drafts.receive(result)) is not None:
                self._answered_at[daemon] = self.now
                self.drafts.deliver_drafts()
            return
        if not 0 <= stage < self.n_stages:
            self.fail(0, "protocol_error", f"a daemon answered for stage {stage}; there are {self.n_stages}")
            return
        if stage in self.lost:  # other answers are to steps sent before the loss
            if (rebuilding := self._rebuilding.pop((stage, result.step_id), None)) is not None:
                self._answered_at[rebuilding[0]] = self.now
                self.outcomes.append(StageRebuilt(stage))
            return
        unanswered = self._unanswered[stage]
        if not unanswered or unanswered[0].step.step_id != result.step_id:
            expected = f"step {unanswered[0].step.step_id}" if unanswered else "no step"
            text = f"stage {stage} answered step {result.step_id} while {expected} was due; its daemon must start anew"
            self.fail(stage, "protocol_error", text)
            return
        entry = unanswered.popleft()
        self._answered_at[self._daemons[stage]] = self.now
        entry.early[stage] = Answer(result, payload)
        self._advance(entry)

    def _advance(self, entry: PipelineStep) -> None:
        while self._open and entry.stage < self.n_stages:
            stage = entry.stage
            answer = entry.early.pop(stage, None)
            if answer is None and stage in self.lost and entry.early:
                # It rang its doorbell, as a later stage has answered, and was lost before answering: times unknown.
                answer = Answer(StepResult(entry.step.step_id, stage), NO_PAYLOAD)
            if answer is None:
                return
            self._at_stage[stage].popleft()
            entry.answers.append(answer)
            if stage == 0 and entry.step.waits_for_tokens and answer.result.sampled:
                entry.step = replace_placeholders(entry.step, tokens_by_sequence(answer.result.sampled))
            entry.stage += 1
            if entry.stage == self.n_stages:
                self._finish(entry)
            else:
                self._go_on(entry)

    def _go_on(self, entry: PipelineStep) -> None:
        """Forward a step to its next stage."""
        stage = entry.stage
        entry.sent_at = self.now
        self._at_stage[stage].append(entry)
        if stage in entry.sent_to or stage in self._cancelling or self._send(entry, stage):
            self.outcomes.append(RowsReady(entry.step, stage - 1))
            if stage == 1:
                self.outcomes.append(FirstStageDone())

    def _finish(self, entry: PipelineStep) -> None:
        """Report a step that all stages have answered."""
        if entry.draft is not None and not entry.draft.with_output:
            self.drafts.send(entry, drawn=entry.drawn(), before=self._sampled)
        self._sampled = entry.answers[-1].result.sampled
        self._publish_tokens(entry)
        if not self._open:
            return
        results, payloads = zip(*entry.answers, strict=True)
        self.outcomes.append(PipelineResult(entry.step, results, payloads, self.now - entry.started_at))

    def _publish_tokens(self, done: PipelineStep) -> None:
        """Fill the tokens of a finished step into the steps that follow it."""
        sampled = done.answers[-1].result.sampled
        for later in [later for later in self.in_flight if later.depends_on_step == done.step.step_id]:
            if later.step.depends_on_step:
                later.step = replace_placeholders(later.step, tokens_by_sequence(sampled))
            elif not matches_sampled(later.step, sampled):  # the output stage was lost since, and drew others again
                text = f"step {later.step.step_id} went on with other tokens than those of step {done.step.step_id}"
                self.fail(0, "protocol_error", text)
                return
        self.send_known_steps()

    def send_known_steps(self) -> None:
        """Send the steps whose tokens and drafts are known to the first stage, in order."""
        waiting = [entry for entry in self._at_stage[0] if 0 not in entry.sent_to and 0 not in self._cancelling]
        for entry in waiting if self._open else ():
            if entry.step.drafts_of and not self.drafts.is_drafting(entry.step.drafts_of):
                entry.step = replace_placeholders(entry.step, {})  # of a drafter that is gone
            if entry.step.waits_for_tokens or not self._send(entry, 0):
                return

    def fail(self, stage: int, code: ErrorCode, message: str) -> None:
        """End the pipeline: drop all steps and report the failure."""
        if self._open:
            self.close()
            self.outcomes.append(StageFailure(stage, code, message))

    def find_unanswered(self, stage: int, step_id: int, now: float) -> tuple[Step, float] | None:
        """Return a step that a stage, or the draft stage, has yet to answer, and the seconds since it was submitted."""
        unanswered = self._unanswered[stage] if 0 <= stage < self.n_stages else ()
        entry = next((entry for entry in unanswered if entry.step.step_id == step_id), None)
        if stage == self.n_stages:
            entry = self.drafts.find_unanswered(step_id)
        return None if entry is None else (entry.step, now - entry.started_at)

    def oldest_in_flight(self, now: float) -> OldestStep | None:
        """Return the step that a daemon has worked on for longest; None when all stages are idle. Its time counts from
        the daemon's last answer."""
        oldest: OldestStep | None = None
        first = [
            (self._daemons[stage], stage, waiting[0].step.step_id, waiting[0].sent_at)
            for stage, waiting in enumerate(self._at_stage)
            if waiting and stage not in self.lost and not waiting[0].step.depends_on_step
            if not self.drafts.is_drafting(waiting[0].step.drafts_of)
        ]
        unanswered = {entry.step.step_id for entry in self._unanswered[-1]}  # of these drafts have not begun
        if (draft := self.drafts.attached) is not None and draft.waiting and draft.waiting[0][0] not in unanswered:
            first.append((draft.daemon, self.n_stages, *draft.waiting[0]))
        first += [(daemon, *place, sent_at) for place, (daemon, sent_at) in self._rebuilding.items()]
        for daemon, stage, step_id, sent_at in first:
            begun_at = max(sent_at, self._answered_at.get(daemon, sent_at))
            if oldest is None or now - begun_at > oldest.elapsed_s:
                oldest = OldestStep(step_id, stage, now - begun_at)
        return oldest

    def close(self) -> None:
        self._open = False
        self.drafts.detach()
        self._rebuilding.clear()
        self._cancelling.clear()
        for waiting in (*self._at_stage, *self._unanswered):
            waiting.clear()

    # ---- lost stages

    @property
    def settled(self) -> bool:
        """True if all steps in flight wait for lost stages or tokens of such steps, and no draft is being made."""
        drafting = self.drafts.attached is not None and self.drafts.attached.waiting
        under_way = any(entry.stage in entry.sent_to for entry in self.in_flight)
        return not (drafting or self._cancelling or under_way)

    def lose(self, stages: Iterable[int]) -> None:
        """Stop sending to these stages and ignore their answers; cancel the steps posted to other stages."""
        self.lost.update(stages)
        self._rebuilding.clear()
        self._cancelling -= self.lost
        for stage in self.lost:
            while self._unanswered[stage]:
                self._unanswered[stage].popleft().lose(stage)
        for entry in [entry for stage in sorted(self.lost) for entry in self._at_stage[stage]]:
            self._advance(entry)
        for stage, unanswered in enumerate(self._unanswered):
            if stage not in self._cancelling and any(stage in entry.posted for entry in unanswered):
                self._cancelling.add(stage)
                self.out.append(SendCancelPending(stage))

    def _on_pending_cancelled(self, message: PendingCancelled) -> None:
        """Take back the posted steps that a stage has not begun, and those after them."""
        stage = message.stage
        if stage not in self._cancelling:
            return  # it was lost since
        self._cancelling.discard(stage)
        unanswered = self._unanswered[stage]
        if [entry.step.step_id for entry in unanswered][: len(message.step_ids)] != message.step_ids:
            self.fail(stage, "protocol_error", f"stage {stage} gave back steps that it does not have")
            return
        back = [unanswered.popleft() for _ in message.step_ids]
        for entry in back:
            entry.lose(stage)
        draft = self.drafts.attached
        if stage + 1 == self.n_stages and draft is not None and draft.with_output:  # in its daemon, it drops them, too
            draft.waiting = deque(asked for asked in draft.waiting if asked[0] not in message.step_ids)
        if message.operations_applied and back:
            back[0].done.add(stage)
        for entry in [entry for entry in self._at_stage[stage] if stage and stage not in entry.sent_to]:
            if not self._send(entry, stage):  # its rows came meanwhile
                return
        self.send_known_steps()
        self.outcomes.append(StepsReturned())

    def rebuild(self, stage: int, step: Step, daemon: int, embeddings: Embeddings = NO_EMBEDDINGS) -> None:
        """Send a step to the new daemon of a lost stage alone, and report when it is answered."""
        self._rebuilding[stage, step.step_id] = (daemon, self.now)
        self.out.append(SendFrame(stage, step.step_id, with_embeddings(step, stage, embeddings)))

    def restore(self, daemons: Mapping[int, int], steps: Mapping[int, Step], *, applied: bool = True) -> None:
        """Send the waiting steps to the ``daemons`` that run the lost stages now. ``steps``: what to send in their
        place, by id. ``applied``: the new daemons got all their operations already."""
        restored, self.lost = self.lost, set()
        self._rebuilding.clear()
        for stage, daemon in daemons.items():
            self._daemons[stage] = daemon
        for entry in self.in_flight:  # also those that wait for tokens
            entry.step = steps.get(entry.step.step_id, entry.step)
            entry.done |= restored if applied else set()
        for entry in [entry for stage in sorted(restored) for entry in self._at_stage[stage]]:
            entry.sent_at = self.now
            if entry.stage and not self._send(entry, entry.stage):
                return
        self.send_known_steps()

    def _may_post(self, entry: PipelineStep, stage: int) -> bool:
        """Return whether a step may be posted to a stage, which requires that all earlier steps were sent to it."""
        step = entry.step
        if not self.has_doorbells or self.lost or not step.slices or step.want_hidden or step.rank_pages:
            return False  # only the last stage may return more than times
        earlier = (before for at in range(stage) for before in self._at_stage[at] if before is not entry)
        return all(stage in before.sent_to for before in earlier)

    def _send(self, entry: PipelineStep, stage: int, *, posted: bool = False) -> bool:
        step = entry.step
        if stage in self.lost:
            return True
        entry.sent_to.add(stage)
        if posted:
            entry.posted.add(stage)
        if step.upkeep and entry.draft is not self.drafts.attached:  # it has none of the sequences, or is gone
            entry.step = step = replace(step, upkeep=False)
        self._unanswered[stage].append(entry)
        try:
            frame = entry.frame(stage, posted=posted)
        except LocalProtocolError as error:  # the step is no message: no later one would be right either
            self.fail(stage, "protocol_error", f"step {step.step_id} cannot be sent: {error}")
            return False
        self.out.append(SendFrame(stage, step.step_id, frame))
        together = entry.draft is not None and entry.draft.with_output and not step.upkeep
        if stage + 1 == self.n_stages and together:
            self.drafts.send(entry)
        return True
