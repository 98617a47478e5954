"""All messages of the protocol as typed records, and their kinds.

A frame's kind selects the record, so metadata carries no type tag; :data:`MESSAGES` is the only table of kinds.
Records on the hot path (``Step``, ``StepResult``) are encoded as arrays.  No sockets, no tensors.

Direction: ``link`` carries Load, Rehearse, Step, DraftStep, Masks, ScoreWindow, Recall, Reset, Check, Save, Restore and
Shutdown down, and Hello, Loaded, Rehearsed, StepResult, WindowScores, Recalled, ResetDone, Failed, Checked, Saved,
Restored and TransferFailed up; ``pulse`` carries Heartbeat, Progress and LogLine up.

The records of loading, checks, steps and transfers live in their own modules.  docs/protocol.md is generated from them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec

from lucevisor.protocol.checks import Check, Checked
from lucevisor.protocol.loading import Hello, Load, Loaded, Rehearse, Rehearsed
from lucevisor.protocol.scoring import ScoreWindow, WindowScores
from lucevisor.protocol.steps import DraftStep, Masks, Recall, Recalled, Reset, ResetDone, Step, StepResult
from lucevisor.protocol.transfers import Restore, Restored, Save, Saved, TransferFailed

PROTOCOL_VERSION = 1


class MessageKind(IntEnum):
    """Frame kinds.  Numbers are never reused."""

    HELLO = 1
    LOAD = 2
    LOADED = 3
    STEP = 4
    STEP_RESULT = 5
    FAILED = 6
    RESET = 7
    CHECK = 8
    CHECKED = 9
    SHUTDOWN = 10
    SAVE = 11
    SAVED = 12
    RESTORE = 13
    RESTORED = 14
    RESET_DONE = 15
    TRANSFER_FAILED = 16
    DRAFT_STEP = 17
    MASKS = 18
    SCORE_WINDOW = 19
    WINDOW_SCORES = 20
    RECALL = 21
    RECALLED = 22
    REHEARSE = 23
    REHEARSED = 24
    HEARTBEAT = 32
    PROGRESS = 33
    LOG_LINE = 34


class Failed(msgspec.Struct, frozen=True):
    """A daemon could not carry out a message.  It exits after sending this."""

    what: str  # "load", "step 17", "check"
    where: str  # "hip:1 layers [20,40)", a file, a tensor
    reason: str
    advice: str
    configuration: bool = False  # a restart would fail the same way: do not retry
    details: str = ""  # traceback


class Shutdown(msgspec.Struct, frozen=True):
    """Shut down in order.  End of file on the link means the same."""

    reason: str = ""


class Heartbeat(msgspec.Struct, frozen=True):
    """Liveness of the process, and how long its compute thread has been busy with one thing."""

    count: int
    phase: Literal["start", "load", "idle", "step", "score", "check"]
    busy_s: float  # in this phase; while loading, since the last progress
    step_id: int
    n_steps: int
    n_tokens: int
    rss_bytes: int
    free_bytes: list[int]  # per device


class Progress(msgspec.Struct, frozen=True):
    """Load progress of one shard."""

    stage: int
    device: int
    done_bytes: int
    total_bytes: int
    phase: str  # "kernels", "pools", "read", "convert", "warm up"


class LogLine(msgspec.Struct, frozen=True):
    """A structured log record of the daemon."""

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, str | int | float | bool | None] = {}


Message = (
    Hello
    | Load
    | Loaded
    | Rehearse
    | Rehearsed
    | Step
    | DraftStep
    | Masks
    | ScoreWindow
    | StepResult
    | WindowScores
    | Failed
    | Recall
    | Recalled
    | Reset
    | ResetDone
    | Check
    | Checked
    | Shutdown
    | Save
    | Saved
    | Restore
    | Restored
    | TransferFailed
    | Heartbeat
    | Progress
    | LogLine
)

MESSAGES: dict[MessageKind, type[Message]] = {
    MessageKind.HELLO: Hello,
    MessageKind.LOAD: Load,
    MessageKind.LOADED: Loaded,
    MessageKind.REHEARSE: Rehearse,
    MessageKind.REHEARSED: Rehearsed,
    MessageKind.STEP: Step,
    MessageKind.DRAFT_STEP: DraftStep,
    MessageKind.MASKS: Masks,
    MessageKind.SCORE_WINDOW: ScoreWindow,
    MessageKind.WINDOW_SCORES: WindowScores,
    MessageKind.STEP_RESULT: StepResult,
    MessageKind.FAILED: Failed,
    MessageKind.RECALL: Recall,
    MessageKind.RECALLED: Recalled,
    MessageKind.RESET: Reset,
    MessageKind.CHECK: Check,
    MessageKind.CHECKED: Checked,
    MessageKind.SHUTDOWN: Shutdown,
    MessageKind.SAVE: Save,
    MessageKind.SAVED: Saved,
    MessageKind.RESTORE: Restore,
    MessageKind.RESTORED: Restored,
    MessageKind.RESET_DONE: ResetDone,
    MessageKind.TRANSFER_FAILED: TransferFailed,
    MessageKind.HEARTBEAT: Heartbeat,
    MessageKind.PROGRESS: Progress,
    MessageKind.LOG_LINE: LogLine,
}
