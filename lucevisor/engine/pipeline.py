"""Takes steps through the pipeline: sends a step to its first stage, and on to the next when a stage has answered.

The hot path is plain callbacks: no task, no queue of our own, one encoding a stage made while the head already works.
Knows neither requests nor pages; whoever reads the links calls :meth:`Pipeline.receive`.
Invariant: a stage answers its steps in the order they were sent to it; anything else ends the pipeline, because then
the two sides no longer agree on what the shards hold.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lucevisor.engine.request import ErrorCode
from lucevisor.protocol.codec import encode
from lucevisor.protocol.errors import LocalProtocolError, WireError
from lucevisor.protocol.messages import Failed
from lucevisor.protocol.steps import Step, StepResult

_NO_PAYLOAD = memoryview(b"")


class StageLink(Protocol):
    """The way to the daemon that runs a stage."""

    def send(self, message: bytes, /) -> None:
        """Send one encoded frame without waiting, and never call the pipeline from inside.

        Raises WireError or OSError when the link is dead.
        """


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """A step that went all the way: what each stage answered, head first.

    ``payloads[s]`` holds the arrays that ``results[s].segments`` describe.  ``hops_s[s]``: from the answer of stage s
    to the step sent on to s + 1.  ``seconds``: from the step sent to the head to the tail's answer.
    """

    step: Step
    results: tuple[StepResult, ...]
    payloads: tuple[memoryview, ...]
    hops_s: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class PipelineFailure:
    """Why a pipeline cannot go on.  ``failed`` is the daemon's own account, when it gave one."""

    stage: int
    code: ErrorCode
    message: str
    failed: Failed | None = None


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """The step that a stage has had for longest.  ``elapsed_s`` counts from when the daemon was free to begin it."""

    step_id: int
    stage: int
    elapsed_s: float


@dataclass(slots=True)
class _Trip:
    step: Step
    started_at: float
    sent_at: float  # to the stage it is at
    frames: list[bytes] = field(default_factory=list)  # for stages 1 and later
    results: list[StepResult] = field(default_factory=list)
    payloads: list[memoryview] = field(default_factory=list)
    hops_s: list[float] = field(default_factory=list)


class Pipeline:
    """Steps on their way through ``stages``; ``stages[s]`` is the link of the daemon that runs stage s (one daemon may
    run several).

    Made when every daemon is ready and holds no sequences; answers to Reset are not for it.  ``on_result`` gets each
    step that the tail answered, in order; ``on_failed`` is called once at most, and nothing after it.
    """

    def __init__(
        self,
        stages: Sequence[StageLink],
        on_result: Callable[[PipelineResult], None],
        on_failed: Callable[[PipelineFailure], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not stages:
            raise ValueError("a pipeline needs at least one stage")
        self._links = list(stages)
        self._on_result = on_result
        self._on_failed = on_failed
        self._clock = clock
        self._lines: list[deque[_Trip]] = [deque() for _ in stages]  # steps at each stage, in the order sent
        self._heard_at: dict[int, float] = {}  # by link: a daemon has one compute thread for all its stages
        self._open = True
        self.on_first_stage_done: Callable[[], None] = lambda: None  # not called by a pipeline of one stage

    @property
    def n_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self._links)

    @property
    def n_in_flight(self) -> int:
        """Steps that the tail has not answered."""
        return sum(len(line) for line in self._lines)

    def submit(self, step: Step) -> None:
        """Send a step to the head.  A dead link ends the pipeline through ``on_failed``, not by an exception."""
        if not self._open:
            return
        now = self._clock()
        trip = _Trip(step, started_at=now, sent_at=now)
        self._lines[0].append(trip)
        if self._send(0, trip):
            # The head works already: what the other stages will need is made ready meanwhile.
            trip.frames = [self._frame(step, stage) for stage in range(1, self.n_stages)]

    def receive(self, result: StepResult, payload: memoryview = _NO_PAYLOAD) -> None:
        """Take a stage's answer: send the step on, or hand it out when it was the tail's."""
        if not self._open:
            return
        heard_at = self._clock()
        stage = result.stage
        if not 0 <= stage < self.n_stages:
            self._fail(
                PipelineFailure(0, "protocol_error", f"a daemon answered for stage {stage}; there are {self.n_stages}")
            )
            return
        line = self._lines[stage]
        if not line or line[0].step.step_id != result.step_id:
            expected = f"step {line[0].step.step_id}" if line else "no step"
            text = f"stage {stage} answered step {result.step_id} while {expected} was due; its daemon must start anew"
            self._fail(PipelineFailure(stage, "protocol_error", text))
            return
        trip = line.popleft()
        self._heard_at[id(self._links[stage])] = heard_at
        trip.results.append(result)
        trip.payloads.append(payload)
        if stage + 1 < self.n_stages:
            self._relay(trip, stage + 1, heard_at)
            if stage == 0 and self._open:
                self.on_first_stage_done()
            return
        seconds = heard_at - trip.started_at
        self._on_result(
            PipelineResult(trip.step, tuple(trip.results), tuple(trip.payloads), tuple(trip.hops_s), seconds)
        )

    def failed(self, stage: int, failed: Failed) -> None:
        """Take a daemon's word that it could not do a step."""
        text = f"stage {stage} ({failed.where}) failed in {failed.what}: {failed.reason}; {failed.advice}"
        self._fail(PipelineFailure(stage, "shard_failed", text, failed))

    def oldest_in_flight(self, now: float) -> StepInFlight | None:
        """Return the step that a daemon has worked on for longest, or None when all stages are idle.

        A step that waits behind others at its daemon has not begun, so its time counts from the daemon's last answer.
        """
        longest: StepInFlight | None = None
        for stage, line in enumerate(self._lines):
            if line:
                begun = max(line[0].sent_at, self._heard_at.get(id(self._links[stage]), line[0].sent_at))
                if longest is None or now - begun > longest.elapsed_s:
                    longest = StepInFlight(line[0].step.step_id, stage, now - begun)
        return longest

    def close(self) -> None:
        """Forget all steps; no callback comes after this."""
        self._open = False
        for line in self._lines:
            line.clear()

    def _relay(self, trip: _Trip, stage: int, heard_at: float) -> None:
        trip.sent_at = heard_at
        self._lines[stage].append(trip)
        if self._send(stage, trip):
            trip.hops_s.append(self._clock() - heard_at)

    def _send(self, stage: int, trip: _Trip) -> bool:
        try:
            self._links[stage].send(trip.frames[stage - 1] if stage else self._frame(trip.step, 0))
        except LocalProtocolError as error:  # the step is no message: a defect here, and no later step would be right
            self._fail(PipelineFailure(stage, "protocol_error", f"step {trip.step.step_id} cannot be sent: {error}"))
            return False
        except (WireError, OSError) as error:
            text = f"step {trip.step.step_id} could not be sent to stage {stage}: {error}"
            self._fail(PipelineFailure(stage, "shard_lost", text))
            return False
        return True

    @staticmethod
    def _frame(step: Step, stage: int) -> bytes:
        return encode(step, request_id=step.step_id, flags=stage)

    def _fail(self, failure: PipelineFailure) -> None:
        if self._open:
            self.close()
            self._on_failed(failure)
