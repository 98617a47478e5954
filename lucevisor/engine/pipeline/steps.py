"""A pipeline's records: a step on its way (where it is, who has it, what was answered), and what comes out.

Decides nothing.  Invariant: a step is at the first stage that has not answered it; later ones may have it already, and
even have answered, when it was posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from lucevisor.engine.request import ErrorCode
from lucevisor.protocol.codec import encode
from lucevisor.protocol.frames import POSTED
from lucevisor.protocol.steps import (
    PENDING,
    CancelPending,
    Masks,
    Operation,
    Sampled,
    Step,
    StepResult,
    tokens_by_sequence,
)


class StageLink(Protocol):
    """The link to the daemon that runs a stage."""

    def send(self, message: bytes | Masks | CancelPending, /, *, payload: Sequence[bytearray] = ()) -> None:
        """Send one encoded frame, or masks with their rows, or a recall, without waiting; never call the pipeline from
        inside.

        Raises ProtocolError or OSError when the link is dead.
        """


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """A step that the last stage has answered: ``results`` and ``payloads`` of every stage it ran on, in order.

    ``payloads[i]`` holds the arrays that ``results[i].segments`` describe.  ``hops_s[i]``: from the answer of stage
    ``results[i].stage`` until the step was sent to the next one.  ``seconds``: from submit to the last answer.
    """

    step: Step
    results: tuple[StepResult, ...]
    payloads: tuple[memoryview, ...]
    hops_s: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class PipelineFailure:
    """Why a pipeline cannot go on, and the stage whose daemon is to blame."""

    stage: int
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """The step a stage has worked on for longest.  ``elapsed_s`` counts from when its daemon was free to begin."""

    step_id: int
    stage: int
    elapsed_s: float


class Answer(NamedTuple):
    """What a stage answered; ``payload`` holds the arrays that ``result.segments`` describe."""

    result: StepResult
    payload: memoryview


@dataclass(slots=True, eq=False)
class AttachedDrafter:
    """The draft stage.  ``with_output``: in the output stage's daemon, which may have a step before it can begin.
    ``waiting``: (step id, when it was sent) of the steps to answer.  ``early``: answers heard before their steps ended.
    """

    link: StageLink
    with_output: bool
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    early: deque[StepResult] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class PipelineStep:
    """A step on its way.  ``stage``: where it is.  ``frames``: encoded for later stages.  ``draft``: the draft stage
    that gets it, if it is attached by then, with the operations ``opening`` in place of the step's own.
    """

    step: Step
    stage: int
    started_at: float
    sent_at: float  # when it came to the stage it is at
    draft: AttachedDrafter | None = None
    opening: Sequence[Operation] | None = None
    frames: dict[int, bytes] = field(default_factory=dict)
    had: set[int] = field(default_factory=set)  # stages that it was sent to, and that are still there
    posted: set[int] = field(default_factory=set)  # of these, before the stage ahead had answered
    done: set[int] = field(default_factory=set)  # stages that have had its operations, and get it without them
    early: dict[int, Answer] = field(default_factory=dict)  # of stages behind the one it is at
    answers: list[Answer] = field(default_factory=list)
    hops_s: list[float] = field(default_factory=list)
    follows: int = 0  # the step whose tokens it starts from; ``step.follows`` is 0 as soon as they are known

    def __post_init__(self) -> None:
        self.follows = self.step.follows

    @property
    def may_be_posted(self) -> bool:
        """Whether all stages may have it at once: each waits for the rows of the one before, and none but the last
        answers more than times."""
        return bool(self.step.slices) and not (self.step.want_hidden or self.step.rank_pages)

    def lose(self, stage: int) -> None:
        """A stage that has not answered it has it no more."""
        self.had.discard(stage)
        self.posted.discard(stage)

    def drawn(self) -> list[list[int]]:
        """Return the tokens that the last stage sampled for each slice."""
        found = tokens_by_sequence(self.answers[-1].result.sampled)
        return [found.get(piece.sequence, []) for piece in self.step.slices]

    def frame(self, stage: int, *, posted: bool = False) -> bytes:
        """Return the frame for a stage."""
        step = replace(self.step, operations=[]) if stage in self.done else self.step
        return encode(step, request_id=step.step_id, flags=stage | POSTED if posted else stage)


def filled(step: Step, known: Mapping[int, Sequence[int]]) -> Step:
    """Return a step with the tokens and drafts that it was sent without, ``known`` by sequence; of drafts what lacks is
    made up, as no stage has them.
    """
    slices = []
    for piece in step.slices:
        if piece.tokens == [PENDING]:
            piece = replace(piece, tokens=[known[piece.sequence][-1]])
        elif piece.drafts_pend:
            piece = piece.with_drafts(known.get(piece.sequence, ()), alone=len(step.slices) == 1)
        slices.append(piece)
    return replace(step, slices=slices, follows=0, drafts_of=0)


def starts_from(step: Step, before: Sequence[Sampled]) -> bool:
    """Whether the decodes of a step start from the tokens that the step ``before`` sampled."""
    newest = {one.sequence: one.token for one in before}
    return all(newest.get(piece.sequence, piece.tokens[0]) == piece.tokens[0] for piece in step.slices)
