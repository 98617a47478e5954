"""A pipeline over links that keep what they are given, answered by hand, with a clock set by hand."""

from __future__ import annotations

from collections.abc import Sequence

from lucevisor.engine.pipeline import Pipeline, PipelineFailure, PipelineResult
from lucevisor.protocol.connection import Connection
from lucevisor.protocol.messages import Role
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import CancelPending, DraftStep, Step, StepResult


class Wire:
    """``sent``: (flags, message) of each frame; ``recalls``; ``error``: raised by whatever is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Step | DraftStep]] = []
        self.recalls: list[CancelPending] = []
        self.error: Exception | None = None
        self._connection = Connection(Role.DAEMON)
        self._connection.state = LinkState.READY

    def send(self, message: object, /, *, payload: object = ()) -> None:
        if self.error is not None:
            raise self.error
        if isinstance(message, CancelPending):
            self.recalls.append(message)
            return
        assert isinstance(message, bytes)
        self._connection.receive(message)
        for frame in self._connection.events():
            assert isinstance(frame.message, Step | DraftStep)
            step = frame.message.step if isinstance(frame.message, DraftStep) else frame.message
            assert frame.request_id == step.step_id
            self.sent.append((frame.flags, frame.message))

    @property
    def steps(self) -> list[tuple[int, Step]]:
        """(flags, step) of all but draft steps."""
        return [(flags, message) for flags, message in self.sent if isinstance(message, Step)]

    @property
    def ids(self) -> list[tuple[int, int]]:
        return [(flags, step.step_id) for flags, step in self.steps]


class Bench:
    """``homes[s]``: the wire of stage s; one more wire than there are stages may serve a drafter."""

    def __init__(self, homes: Sequence[int], *, has_doorbells: bool = False) -> None:
        self.now = 0.0
        self.wires = [Wire() for _ in range(max(homes) + 1)]
        self.results: list[PipelineResult] = []
        self.plans: list[Step] = []  # submitted when a step ends, as the engine does
        self.failures: list[PipelineFailure] = []
        self.pipeline = Pipeline(
            [self.wires[home] for home in homes],
            self.on_result,
            self.failures.append,
            clock=lambda: self.now,
            has_doorbells=has_doorbells,
        )

    def on_result(self, result: PipelineResult) -> None:
        self.results.append(result)
        if self.plans:
            self.pipeline.submit(self.plans.pop(0))

    def answer(self, step_id: int, *stages: int, hop_s: float = 0.0) -> None:
        for stage in stages:
            self.pipeline.receive(StepResult(step_id, stage, hop_s=hop_s))

    @property
    def done(self) -> list[int]:
        return [result.step.step_id for result in self.results]
