"""Events and instructions of the engine core, and its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final, Literal, get_args

import msgspec

from lucevisor.engine.constraint import MadeMasks, MaskJob
from lucevisor.engine.journal import RowInstruction
from lucevisor.engine.pipeline import NO_PAYLOAD, PipelineResult, Sends, StageFailure
from lucevisor.engine.request import ErrorCode, Event, GenerationRequest, RequestError
from lucevisor.engine.sequence import RequestRecord, WantedRows
from lucevisor.protocol.steps import PendingCancelled, StepResult


class EngineState(StrEnum):
    """State of the engine core.  Requests are taken in all but UNAVAILABLE and CLOSED."""

    UNAVAILABLE = auto()  # no pipeline, and none is waited for: requests are refused
    SERVING = auto()  # steps are planned
    DRAINING = auto()  # no step is planned; those in flight end
    FROZEN = auto()  # every daemon has done all that was decided
    REBUILDING = auto()  # stages are lost; the others keep their state
    HOLDING = auto()  # no pipeline: requests wait for the next one
    UNLOADED = auto()  # no pipeline, and none comes by itself: requests wait while the model is loaded for them
    CLOSED = auto()  # for good


_LOST: Final = {
    EngineState.HOLDING: "all stages lost, or one that cannot be rebuilt alone",
    EngineState.UNAVAILABLE: "the same without recovery.hold_s; given up",
    EngineState.UNLOADED: "the model is unloaded",
    EngineState.CLOSED: "closed",
}

TRANSITIONS: Final[Mapping[EngineState, Mapping[EngineState, str]]] = {
    EngineState.UNAVAILABLE: {
        EngineState.SERVING: "stages ready",
        EngineState.UNLOADED: "it is loaded on demand",
        EngineState.CLOSED: "closed",
    },
    EngineState.SERVING: {
        EngineState.DRAINING: "freeze",
        EngineState.REBUILDING: "some stages lost",
        **_LOST,
    },
    EngineState.DRAINING: {
        EngineState.FROZEN: "every daemon has done all steps",
        EngineState.SERVING: "thaw",
        EngineState.REBUILDING: "some stages lost",
        **_LOST,
    },
    EngineState.FROZEN: {
        EngineState.SERVING: "thaw; stages ready",
        EngineState.REBUILDING: "some stages lost",
        **_LOST,
    },
    EngineState.REBUILDING: {EngineState.SERVING: "stages rebuilt", **_LOST},
    EngineState.HOLDING: {
        EngineState.SERVING: "stages ready",
        EngineState.UNAVAILABLE: "given up",
        EngineState.UNLOADED: "the model is unloaded",
        EngineState.CLOSED: "closed",
    },
    EngineState.UNLOADED: {EngineState.SERVING: "stages ready", EngineState.CLOSED: "closed"},
    EngineState.CLOSED: {},
}
"""The causes of every move; docs/states.md is printed from this table."""


class InvalidEngineTransition(Exception):
    """A move that the table does not list: a bug in this program.  Its message ends with the last transitions."""


PauseReason = Literal["loss", "restart", "reload"]
"""Reason of a pause: a daemon was lost, an operator restarted it, or moved layers to other daemons."""

PAUSE_REASONS: tuple[PauseReason, ...] = get_args(PauseReason)


# ---- events


@dataclass(frozen=True, slots=True)
class Submit:
    """A request, which the next event plans, a Tick if no other.  Refusals are raised as SubmitError."""

    request: GenerationRequest
    wanted: WantedRows | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Let a held request start."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request; as failed if there is an ``error``."""

    request_id: str
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Give waiting requests to another engine, in Released; ``running``: all, if every daemon has done what was
    decided."""

    running: bool = False


@dataclass(frozen=True, slots=True)
class Adopt:
    """A request that another engine released.  Refusals are raised as SubmitError."""

    record: RequestRecord


class StageAnswer(msgspec.Struct, frozen=True, gc=False):
    """Answer of a stage, or of the draft stage after the last one. ``blamed``: the stage whose numbers are invalid, if
    any."""

    result: StepResult | PendingCancelled
    payload: memoryview = NO_PAYLOAD
    blamed: str = ""


@dataclass(frozen=True, slots=True)
class DrafterReady:
    """A draft stage whose daemon holds no sequences. ``with_output``: its daemon is the output stage's. ``restored``:
    it has the state of the drafter before, and no step was planned since."""

    daemon: int
    with_output: bool
    restored: bool = False


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """Go on without drafts."""


@dataclass(frozen=True, slots=True)
class DrafterBroken:
    """The link or an answer of the drafter was wrong."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class StagesReady:
    """Daemons that hold no sequences, by stage. ``restored``: they have what was frozen before PipelineHandedOff, so
    running requests go on."""

    daemons: Sequence[int]
    has_doorbells: bool = False
    restored: bool = False
    drafter: DrafterReady | None = None


@dataclass(frozen=True, slots=True)
class StagesLost:
    """The daemons of some stages are gone.  The others keep their state if the journal or a freeze allows it."""

    stages: frozenset[int]
    error: RequestError


@dataclass(frozen=True, slots=True)
class StagesReplaced:
    """New daemons for all lost stages. ``restored``: they have what was frozen before the loss. ``replayed``: stages
    whose daemons computed the replay prepared since the last loss. ``drafter`` is attached when the stages are rebuilt.
    """

    daemons: Mapping[int, int]
    restored: bool = False
    replayed: frozenset[int] = frozenset()
    drafter: DrafterReady | None = None


@dataclass(frozen=True, slots=True)
class PipelineLost:
    """All stages are gone.  ``permanent``: no pipeline will come by itself, so queued requests end, too."""

    error: RequestError
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Unload:
    """Requests wait for StagesReady, however long that takes. ``error``: why loading failed; requests that wait end
    with it."""

    reason: str
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class PipelineHandedOff:
    """Leave the pipeline after a freeze for one whose journal has ``journal_pages``."""

    error: RequestError
    journal_pages: int = 0


@dataclass(frozen=True, slots=True)
class ShardStateUnknown:
    """A daemon answered what it must not, or masks could not be made: the state of the shards is unknown."""

    failure: StageFailure


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Another reason why requests are not served."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class MasksMade:
    """The masks of a step."""

    step_id: int
    made: MadeMasks


@dataclass(frozen=True, slots=True)
class PagesRanked:
    """The relevance of each whole page of a sequence that waited for it since ``step_id``; none: it is unknown."""

    step_id: int
    sequence: int
    scores: Sequence[float]


@dataclass(frozen=True, slots=True)
class Freeze:
    """Plan no step, and bring every daemon to the same point."""

    reason: PauseReason = "restart"


@dataclass(frozen=True, slots=True)
class Thaw:
    """Plan steps again after Freeze."""


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Start no queued request until StagesReady."""


@dataclass(frozen=True, slots=True)
class PrepareReplay:
    """Plan what rebuilds lost stages, for their daemons to compute while they load.  Raises CannotRebuild."""

    stages: frozenset[int]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse new requests from now on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """End all requests, and refuse new ones."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class Flush:
    """Send what waits for a step, even without a slice."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Plan again: pages were freed."""


CoreEvent = (
    Submit
    | Resume
    | Cancel
    | Release
    | Adopt
    | StageAnswer
    | DrafterReady
    | DrafterLost
    | DrafterBroken
    | StagesReady
    | StagesLost
    | StagesReplaced
    | PipelineLost
    | Unload
    | PipelineHandedOff
    | ShardStateUnknown
    | Unavailable
    | MasksMade
    | PagesRanked
    | Freeze
    | Thaw
    | Quiesce
    | PrepareReplay
    | Refuse
    | Close
    | Flush
    | Tick
)

# ---- instructions, beside those of the pipeline and the journal


class MakeMasks(msgspec.Struct, frozen=True, gc=False):
    """Make the masks of a step that was sent; MasksMade has them."""

    step_id: int
    jobs: Sequence[MaskJob]


class RankPages(msgspec.Struct, frozen=True, gc=False):
    """Rank the pages of a sequence by relevance to its end; PagesRanked has the scores."""

    step_id: int
    sequence: int
    tokens: Sequence[int]


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Hand events to the readers of requests, in order."""

    events: Sequence[tuple[str, Event]]


class Released(msgspec.Struct, frozen=True, gc=False):
    """Requests that are not this engine's any more."""

    records: Sequence[RequestRecord]


class StepFinished(msgspec.Struct, frozen=True, gc=False):
    """A step that all stages have answered.  ``request_id``: who wants its payloads, if anybody does."""

    result: PipelineResult
    request_id: str = ""


class ReportPipelineFailure(msgspec.Struct, frozen=True, gc=False):
    """The pipeline was dropped because of a failure."""

    failure: StageFailure


class ReportDrafterFailure(msgspec.Struct, frozen=True, gc=False):
    """The drafter was detached because of a failure."""

    failure: StageFailure


class RebuildEnded(msgspec.Struct, frozen=True, gc=False):
    """All lost stages are rebuilt, or the pipeline was dropped because they cannot be."""

    rebuilt: bool


Instruction = (
    Sends
    | RowInstruction
    | MakeMasks
    | RankPages
    | Deliver
    | Released
    | StepFinished
    | ReportPipelineFailure
    | ReportDrafterFailure
    | RebuildEnded
)
"""In order: what is sent first is first."""
