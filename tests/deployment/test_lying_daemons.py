"""A daemon that lies in any field of any answer: it alone is replaced, and each request ends once."""

from __future__ import annotations

import dataclasses
import math
import random
import struct
import typing

import msgspec
import pytest
from msgspec.structs import replace

from lucevisor.engine.request import FinishedEvent, TokenEvent
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.protocol.frames import Frame
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
    MESSAGES,
    Checked,
    CheckLine,
    Failed,
    Heartbeat,
    ImageRows,
    LogLine,
    Message,
    Progress,
    Restored,
    Role,
    Saved,
    StreamKind,
    Timing,
    TransferFailed,
    Unloaded,
    WindowScores,
)
from lucevisor.protocol.steps import (
    Drafted,
    PageScores,
    PendingCancelled,
    PromptLogprobs,
    ResetDone,
    RowsCopy,
    Sampled,
    SamplingParams,
    StepResult,
)
from lucevisor.protocol.validation import DaemonFacts, fault_of
from tests.deployment.daemon_groups import Groups, drained
from tests.engine.toy_engine import request
from tests.engine.toy_pipeline import VOCABULARY, Violation

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
            prompt_logprobs=[PromptLogprobs(0, 1, [-1.0], [[(1, -1.0)]])], page_scores=[PageScores(0, [0.5])],
            hop_s=0.01, upkeep_s=0.02,
        ),
        LOAD,
        NONE,
    ),
    (StepResult(3, 1, [], 0.1, 0.2, drafts=[Drafted(0, [5, 6], [0.5, 0.25])]), LOAD, NONE),
    (WindowScores(1, 2, 0.1), LOAD, memoryview(struct.pack("2f", 0.5, 0.25))),
    (ImageRows(1, 2, 0.1), LOAD, memoryview(bytes(64))),
    (PendingCancelled(0, [3, 4], operations_applied=True), LOAD, NONE),
    (ResetDone(4), LOAD, NONE),
    (RowsCopy(False, 0, 1, 3, 1, 0), LOAD, memoryview(b"rows")),
    (Failed("step 3", "cpu:0", "out of memory", "free some"), LOAD, NONE),
    (Checked([CheckLine("cpu:0", True, "fine")], [Timing(0.1, 0.2)]), LOAD, NONE),
    (Saved(1, 100, 0.1), LOAD, NONE),
    (Unloaded(1000, 0.1), LOAD, NONE),
    (Restored(1, 100, 0.1), LOAD, NONE),
    (TransferFailed(1, "a file", "it is short", "delete it"), LOAD, NONE),
    (Heartbeat(3, "idle", 0.1, 4, 5, 6, 7, [8]), LOAD, NONE),
    (Progress(0, 0, 10, 20, "read"), LOAD, NONE),
    (LogLine("info", "hello", {"seconds": 0.5, "n": 3, "name": "x"}), LOAD, NONE),
]  # fmt: skip

TRUE = {f"{i} {type(said[0]).__name__}": said for i, said in enumerate(MESSAGES_SAID)}
MANY = pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])
N_CASES = pytest.mark.parametrize("n_cases", [120, MANY])
AGE_S = 60.0

FLOATS = (math.nan, math.inf, -math.inf, -1.0, 1e9, 0.25)
INTEGERS = (-1, -(2**40), 2**62, 0, 1, 7, VOCABULARY, 2**31)


def lie(value: object, rng: random.Random) -> object:
    """The value with one number, text or length changed, anywhere inside."""
    match value:
        case bool():
            return not value
        case float():
            return rng.choice(FLOATS)
        case int():
            return rng.choice(INTEGERS)
        case str():
            return rng.choice(("", "lie", "x" * 1000))
        case None:
            return rng.choice((*FLOATS, None))
        case msgspec.Struct():
            name = rng.choice(value.__struct_fields__)
            return replace(value, **{name: lie(getattr(value, name), rng)})
        case list() | tuple():
            items = list(value)
            how = rng.choice(("change", "drop", "double", "all")) if items else "none"
            at = rng.randrange(len(items)) if items else 0
            if how == "change":
                items[at] = lie(items[at], rng)
            elif how == "drop":
                del items[at]
            elif how == "double":
                items.insert(at, items[at])
            elif how == "all":
                items = items * 40
            return type(value)(items)
        case dict():
            return {**value, "lie": math.nan}
        case _:
            return value


def load_of(groups: Groups, group: str) -> Load:
    n = len(groups.homes)
    stages = [
        StagePlan(s, [ShardPlan(0, LayerRange(s, s + 1))], None, None, embedding=s == 0, output=s == n - 1)
        for s, home in enumerate(groups.homes)
        if home == group
    ]
    draft = DraftPlan(n, DraftKind.MTP, [], 0, LayerRange(0, 1), []) if group == groups.draft else None
    return Load([], Dtype.FLOAT32, Dtype.FLOAT32, stages, [], PoolSizes(16, 0, 2), 2, 128, draft=draft)


def replaced(groups: Groups, group: str) -> None:
    groups.die(group)
    groups.lost(group)
    groups.ready(group)


def play(seed: int) -> tuple[bool, bool]:
    """A few requests, and a lie in one answer; return whether it was found at the border, and whether at all."""
    rng = random.Random(seed)
    homes = rng.choice((["left"], ["left", "right"], ["left", "right", "left"]))
    draft = rng.choice(("", "", homes[-1], "draft"))
    groups = Groups(homes, draft, hold_s=rng.choice((0.0, 60.0)), journal_pages=rng.choice((0, 16)), clock=lambda: 0.0)
    for group in dict.fromkeys([*homes, *([draft] if draft else [])]):
        groups.ready(group)
    groups.work()
    asked, handles = [], []
    for i in range(3):
        sampling = SamplingParams(seed=1000 * seed + i, n_top_logprobs=-1)
        one = dataclasses.replace(request(f"r{i}", rng.sample(range(VOCABULARY), 3), n=6), sampling=sampling)
        asked.append(one)
        handles.append(groups.submit(one))
    liar, due = rng.choice(sorted(groups.processes)), rng.randrange(12)
    at_border = found = lied = plausible = False
    for _ in range(4000):
        busy = [name for name, process in groups.processes.items() if process.busy]
        if not busy:
            break
        group = rng.choice(busy)
        try:
            frame = groups.processes[group].work()
        except Violation:  # a drafter that has steps of a pipeline that is gone: what it makes of them is dropped
            assert group == groups.draft
            assert lied
            replaced(groups, group)
            continue
        message = frame.message
        if isinstance(message, StepResult):
            if group == liar and not lied:
                due -= 1
                if due < 0:
                    lied = True
                    message = typing.cast(StepResult, lie(message, rng))
            facts = DaemonFacts(AGE_S, load_of(groups, group), vocabulary=VOCABULARY)
            fault = fault_of(
                message, frame.payload, facts, groups.engine.find_unanswered(message.stage, message.step_id)
            )
            if fault:
                assert group == liar
                assert lied
                at_border = found = True
                replaced(groups, group)
                continue
            plausible = plausible or message != frame.message
        n_failures, n_drafters = len(groups.failures), len(groups.drafters_lost)
        groups.assembly.on_frame(group, Frame(frame.kind, frame.flags, frame.request_id, message, frame.payload))
        if len(groups.failures) > n_failures:  # the pipeline found it
            blamed = groups.homes[groups.failures[-1].stage]
            assert blamed == liar, groups.failures[-1]
            found = True
            replaced(groups, blamed)
        elif len(groups.drafters_lost) > n_drafters:
            assert groups.draft == liar
            found = True
            replaced(groups, liar)
    for one, handle in zip(asked, handles, strict=True):
        events = drained(handle)
        assert sum(isinstance(event, FinishedEvent) for event in events) == 1, (seed, one.request_id, events)
        end = events[-1]
        assert isinstance(end, FinishedEvent)
        tokens = [event.token for event in events if isinstance(event, TokenEvent)]
        assert all(0 <= token < VOCABULARY for token in tokens)
        if end.reason == "length" and not plausible:
            assert tokens == groups.model.alone(one.prompt, one.sampling, one.max_tokens, frozenset())
        if end.error is not None:
            assert found or plausible
    assert_finite(msgspec.to_builtins(groups.engine.statistics(), enc_hook=str))
    return at_border, found


def assert_finite(value: object) -> None:
    if isinstance(value, float):
        assert math.isfinite(value)
        assert value < 1e6
    elif isinstance(value, dict):
        for inner in value.values():
            assert_finite(inner)
    elif isinstance(value, list):
        for inner in value:
            assert_finite(inner)


@N_CASES
def test_a_daemon_that_lies_is_replaced_and_honest_ones_stay(n_cases: int) -> None:
    outcomes = [play(seed) for seed in range(n_cases)]
    assert sum(at_border for at_border, _ in outcomes) > 0.2 * n_cases
    assert sum(found for _, found in outcomes) >= sum(at_border for at_border, _ in outcomes)


FROM_DAEMONS = [
    message.record
    for message in MESSAGES.values()
    if message.sender is Role.DAEMON and message.stream in (StreamKind.LINK, StreamKind.HEARTBEAT)
]


def floats_in(value: object) -> typing.Iterator[float]:
    match value:
        case float():
            yield value
        case msgspec.Struct():
            for name in value.__struct_fields__:
                yield from floats_in(getattr(value, name))
        case list() | tuple():
            for inner in value:
                yield from floats_in(inner)
        case dict():
            for inner in value.values():
                yield from floats_in(inner)


@N_CASES
def test_what_passes_the_border_has_finite_numbers(n_cases: int) -> None:
    """Whatever message, whatever field."""
    facts = {name: DaemonFacts(AGE_S, load, vocabulary=VOCABULARY) for name, (_, load, _) in TRUE.items()}
    for seed in range(n_cases):
        rng = random.Random(seed)
        name = rng.choice(sorted(TRUE))
        true, _, payload = TRUE[name]
        assert not fault_of(true, payload, facts[name])
        said = typing.cast(Message, lie(true, rng))
        if not fault_of(said, payload, facts[name]):
            assert all(math.isfinite(number) for number in floats_in(said)), (seed, said)


def test_every_message_of_a_daemon_has_a_true_example() -> None:
    assert {type(message) for message, _, _ in TRUE.values()} == set(FROM_DAEMONS)
