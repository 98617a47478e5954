"""A true example of each message that daemons send: message, what the daemon was told to load, payload."""

from __future__ import annotations

import struct

from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.protocol.loading import (
    DeviceInfo,
    DeviceUse,
    DraftKind,
    DraftPlan,
    Hello,
    Load,
    Loaded,
    PoolSizes,
    ShardPlan,
    StagePlan,
)
from lucevisor.protocol.messages import (
    Checked,
    CheckLine,
    Failed,
    Heartbeat,
    LogLine,
    Message,
    Progress,
    Restored,
    Saved,
    Timing,
    TransferFailed,
    WindowScores,
)
from lucevisor.protocol.steps import (
    Drafted,
    PageScores,
    PendingCancelled,
    ResetDone,
    RowsCopy,
    Sampled,
    Scored,
    StepResult,
)

STAGE = StagePlan(0, [ShardPlan(0, LayerRange(0, 4))], None, None, embedding=True, output=True)
DRAFT = DraftPlan(1, DraftKind.MTP, [], 0, LayerRange(0, 1), [])
LOAD = Load([], Dtype.FLOAT32, Dtype.FLOAT32, [STAGE], [], PoolSizes(16, 0, 2), 2, 128, draft=DRAFT)
USE = DeviceUse(0, LayerRange(0, 4), 1000, 2000, 3000)
DEVICE = DeviceInfo(0, "cpu", 1 << 30, 1 << 29, "x86_64", [Dtype.FLOAT32])
NONE = memoryview(b"")

MESSAGES_SAID: list[tuple[Message, Load | None, memoryview]] = [
    (Hello(1, "abc", 7, "3.12", "/usr/bin/python", "2.9", Backend.CPU, [DEVICE], 1 << 30, {"numpy": "2"}), None, NONE),
    (Loaded([USE], {"linear": "triton"}, 1.5, draft=USE), LOAD, NONE),
    (
        StepResult(
            3, 0, [Sampled(0, 5, -0.5, [(5, -0.5), (6, -1.0)], 2.0)], 0.1, 0.2,
            scored=[Scored(0, 1, [-1.0], [[(1, -1.0)]])], page_scores=[PageScores(0, [0.5])], hop_s=0.01, upkeep_s=0.02,
        ),
        LOAD,
        NONE,
    ),
    (StepResult(3, 1, [], 0.1, 0.2, drafts=[Drafted(0, [5, 6], [0.5, 0.25])]), LOAD, NONE),
    (WindowScores(1, 2, 0.1), LOAD, memoryview(struct.pack("2f", 0.5, 0.25))),
    (PendingCancelled(0, [3, 4], operated=True), LOAD, NONE),
    (ResetDone(4), LOAD, NONE),
    (RowsCopy(False, 0, 1, 3, 1, 0), LOAD, memoryview(b"rows")),
    (Failed("step 3", "cpu:0", "out of memory", "free some"), LOAD, NONE),
    (Checked([CheckLine("cpu:0", True, "fine")], [Timing(0.1, 0.2)]), LOAD, NONE),
    (Saved(1, 100, 0.1), LOAD, NONE),
    (Restored(1, 100, 0.1), LOAD, NONE),
    (TransferFailed(1, "a file", "it is short", "delete it"), LOAD, NONE),
    (Heartbeat(3, "idle", 0.1, 4, 5, 6, 7, [8]), LOAD, NONE),
    (Progress(0, 0, 10, 20, "read"), LOAD, NONE),
    (LogLine("info", "hello", {"seconds": 0.5, "n": 3, "name": "x"}), LOAD, NONE),
]  # fmt: skip
TRUE = {f"{i} {type(said[0]).__name__}": said for i, said in enumerate(MESSAGES_SAID)}
