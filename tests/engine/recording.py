"""Records what an engine core was told and answered, and replays it: the same events give the same instructions.

A recording holds for an engine without host memory for preempted requests and without snapshots, whose owners call the
scheduler themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lucevisor.engine import events as ev
from lucevisor.engine.constraint import make_masks
from lucevisor.engine.core import CoreSettings, EngineCore
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.recovery import CannotRebuild
from lucevisor.engine.request import SubmitError
from lucevisor.engine.shell import Engine
from lucevisor.protocol.steps import Step


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """An event, when it was handled, and the instructions it led to, or the error."""

    event: ev.CoreEvent
    now: float
    instructions: Sequence[object]


@dataclass(slots=True)
class Recording:
    """``started_at``: when the core was made.  ``has_rows``: the core's questions about rows, answered, in order."""

    limits: EngineLimits
    settings: CoreSettings
    started_at: float
    events: list[RecordedEvent] = field(default_factory=list)
    has_rows: list[bool] = field(default_factory=list)

    def add(self, event: ev.CoreEvent, now: float, instructions: Sequence[ev.Instruction] | Exception) -> None:
        """Record an event that was handled, or refused with an exception."""
        if isinstance(event, ev.Submit) and event.request.constraint is not None:  # it advances with the output
            constraint = copy.deepcopy(event.request.constraint)
            event = replace(event, request=replace(event.request, constraint=constraint))
        self.events.append(RecordedEvent(event, now, _comparable(instructions)))

    def new_core(self) -> EngineCore:
        """Return a core as the recorded one was before the first event."""
        answers = iter(self.has_rows)

        def has_rows(_boundary: int, _step: Step) -> bool:
            answer = next(answers, None)
            if answer is None:
                raise ReplayDiffers("the core asks for more rows than were recorded")
            return answer

        return EngineCore(self.limits, self.settings, self.started_at, has_rows)


def record(engine: Engine) -> Recording:
    """Record all events of an engine from now on, which must be before the first one."""
    core = engine.core
    recording = Recording(core.scheduler.limits, core._settings, core._now)
    ask, handle = core._has_rows, core.handle

    def has_rows(boundary: int, step: Step) -> bool:
        recording.has_rows.append(ask(boundary, step))
        return recording.has_rows[-1]

    def recorded(event: ev.CoreEvent, now: float) -> list[ev.Instruction]:
        try:
            instructions = handle(event, now)
        except Exception as error:
            recording.add(event, now, error)
            raise
        recording.add(event, now, instructions)
        return instructions

    core._has_rows, core.handle = has_rows, recorded  # type: ignore[method-assign]
    if core._stage_recovery._journal is not None:
        core._stage_recovery._journal._has_rows = has_rows
    return recording


class ReplayDiffers(AssertionError):
    """A core did something else than was recorded."""


def replay(recording: Recording, core: EngineCore) -> None:
    """Feed a recording to a new core.  Raises ReplayDiffers at the first other instruction."""
    for number, recorded in enumerate(recording.events):
        instructions: Sequence[ev.Instruction] | Exception
        try:
            instructions = core.handle(recorded.event, recorded.now)
        except (SubmitError, CannotRebuild) as error:
            instructions = error
        for instruction in () if isinstance(instructions, Exception) else instructions:
            if isinstance(instruction, ev.MakeMasks):
                make_masks(instruction.step_id, instruction.jobs)  # constraints take the output as they did
        if (comparable := _comparable(instructions)) != recorded.instructions:
            raise ReplayDiffers(
                f"event {number} at {recorded.now:.6f}, {recorded.event!r:.2000}, led to\n{comparable!r:.4000}\n"
                f"and to\n{recorded.instructions!r:.4000}\nwhen it was recorded; the transitions were\n"
                + "\n".join(map(str, core.transitions))
            )


def _comparable(instructions: Sequence[ev.Instruction] | Exception) -> list[object]:
    """Return instructions without what has an identity of its own: constraints, and memory that is used again."""
    if isinstance(instructions, Exception):
        return [str(instructions)]
    found: list[object] = []
    for instruction in instructions:
        match instruction:
            case ev.MakeMasks(step_id, jobs):
                found.append((step_id, [(job.request_id, job.start, [*job.tokens], [*job.drafts]) for job in jobs]))
            case ev.StepFinished(result, request_id):
                found.append((result.step, result.results, result.seconds, request_id))
            case ev.RankPages(step_id, sequence, tokens):
                found.append((step_id, sequence, [*tokens]))
            case ev.Deliver(events):
                found.append([*events])
            case _:
                found.append(instruction)
    return found
