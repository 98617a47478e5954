"""Steps that run layer by layer while the weights load leave what they leave one after the other, bit for bit."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from daemons.models.replay import LayerwiseReplay, RowFile, layerwise_replays
from daemons.models.stage import LoadedStage
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.files import LocalFile
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan, StageReplay
from lucevisor.protocol.steps import (
    CopyPage,
    CopyState,
    OpenSequence,
    SamplingParams,
    SetPages,
    Slice,
    Step,
    UseState,
    ZeroState,
)
from tests.daemons.cpu_kernels import needs_cpu_kernels
from tests.daemons.snapshot_pipeline import golden_spec

DEMO = Path(__file__).parents[2] / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"
SELECTOR = SimpleNamespace(device=torch.device("cuda"))
POOLS = PoolSizes(full_pages=9, window_pages=0, states=6, host_states=2)


def tokens(seed: int, n: int) -> list[int]:
    return [(i * 31 + seed * 7) % 250 for i in range(n)]


def steps_of(spec) -> list[Step]:
    """Two sequences in chunks of several lengths; of the first one a slot at 70 is kept, in host memory."""
    recurrent = KvGroup.RECURRENT in spec.kv_groups()
    opening, copies = [], [CopyPage(KvGroup.FULL, 2, 5, 6)]
    for sequence, pages in enumerate(([1, 2, 3], [7, 6, 4])):
        opening += [OpenSequence(sequence, sequence, SamplingParams()), SetPages(sequence, KvGroup.FULL, 0, pages)]
        opening += [ZeroState(sequence)] * recurrent
    copies += [CopyState(0, 4)] * recurrent
    slices = [Slice(0, 0, tokens(1, 70), sample=False), Slice(0, 70, tokens(2, 80), sample=False)]
    slices += [Slice(1, 0, tokens(3, 33), sample=False)]
    steps = [Step(0, 0, opening), Step(1, 0, [], slices[:1]), Step(2, 0, copies), Step(3, 0, [], slices[1:2])]
    both = [Slice(0, 150, [5, 6, 7], sample=False), Slice(1, 33, [8, 9, 10], sample=False)]
    return [*steps, Step(4, 0, [], slices[2:]), Step(5, 0, [], both)]


def plans_of(spec) -> list[StagePlan]:
    half = spec.n_layers // 2
    first = StagePlan(0, [ShardPlan(0, LayerRange(0, half))], None, 0, embedding=True, output=False)
    return [first, StagePlan(1, [ShardPlan(0, LayerRange(half, spec.n_layers))], 0, None, embedding=False, output=True)]


def load_of(pools=POOLS, stages=(), **more) -> Load:
    return Load([], Dtype.FLOAT32, Dtype.FLOAT32, [*stages], [], pools, 4, 512, **more)


def loaded(spec, plan, load, replay=None, backend=Backend.CPU) -> LoadedStage:
    return LoadedStage.load(spec, plan, load, backend, lambda _: None, replay)


def pools_for(spec) -> PoolSizes:
    recurrent = KvGroup.RECURRENT in spec.kv_groups()
    return POOLS if recurrent else PoolSizes(full_pages=9, window_pages=0, states=0)


def one_after_the_other(spec, plan, rows, backend=Backend.CPU):
    """The stage after all steps, and what it hands on."""
    stage, out, at = loaded(spec, plan, load_of(pools_for(spec)), backend=backend), [], 0
    for step in steps_of(spec):
        stage.apply(step.operations)
        if step.slices:
            given = None if rows is None else rows[at : at + step.n_tokens]
            out.append(stage.forward(step, given).rows.clone())
            at += step.n_tokens
    return stage, torch.cat(out)


def bits(stage: LoadedStage) -> list[torch.Tensor]:
    [pools] = stage.sequences.pools
    return [t for _, tensors in pools._stacks for t in tensors] + pools._host_stacks


def file_of(rows: torch.Tensor, n_before: int) -> LocalFile:
    fd = os.memfd_create("rows")
    os.pwrite(fd, torch.cat([torch.full((n_before, rows.shape[1]), 7.0), rows]).numpy().tobytes(), 0)
    return LocalFile(fd)


@pytest.mark.parametrize("architecture", ["qwen35", "qwen3"])
def test_a_replay_leaves_what_the_steps_leave(architecture):
    spec = golden_spec(architecture)
    plans, rows = plans_of(spec), None
    for plan in plans:
        right, out = one_after_the_other(spec, plan, rows)
        load = load_of(pools_for(spec), plans, replay=[StageReplay(plan.stage, steps_of(spec), first_row=3)])
        fd = file_of(torch.empty(0, spec.boundary_width) if rows is None else rows, 3)
        [replay] = layerwise_replays(load, spec, fd).values()
        stage = loaded(spec, plan, load, replay)
        assert stage.replayed(replay), replay.problem
        for a, b in zip(bits(stage), bits(right), strict=True):
            assert torch.equal(a, b)
        assert stage.sequences.by_id == right.sequences.by_id
        after = Step(6, 0, [], [Slice(0, 153, [11, 12], sample=False), Slice(1, 36, [13], sample=False)])
        given = None if rows is None else out.new_ones(3, spec.boundary_width)
        assert torch.equal(stage.forward(after, given).rows, right.forward(after, given).rows)
        rows = out


def test_what_cannot_be_replayed_leaves_a_stage_without_sequences():
    spec = golden_spec("qwen35")
    plan = plans_of(spec)[1]
    load = load_of(stages=[plan], replay=[StageReplay(1, steps_of(spec))])
    [replay] = layerwise_replays(load, spec, file_of(torch.zeros(5, spec.boundary_width), 0)).values()
    stage = loaded(spec, plan, load, replay)
    assert not stage.replayed(replay)
    assert "the file of rows ends before row" in replay.problem
    assert not stage.sequences.by_id


def test_sliding_layers_are_not_replayed():
    spec = golden_spec("gemma4_e2b")
    load = load_of(stages=plans_of(spec), replay=[StageReplay(0, [])])
    [replay] = layerwise_replays(load, spec, file_of(torch.zeros(0, spec.boundary_width), 0)).values()
    assert "window pages are reused" in replay.problem


def test_rows_that_are_being_written_are_waited_for():
    rows = torch.arange(40.0).view(10, 4)
    fd = os.memfd_create("rows", os.MFD_ALLOW_SEALING)
    file, written = RowFile(LocalFile(os.dup(fd)), 4, torch.float32), rows.numpy().tobytes()

    def write():
        for at in range(0, len(written) - 16, 24):  # one and a half rows; the last row never comes
            os.pwrite(fd, written[at : min(at + 24, len(written) - 16)], at)
            time.sleep(0.002)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)

    writer = threading.Thread(target=write)
    writer.start()
    assert torch.equal(file.read(0, 9, torch.device("cpu")), rows[:9])
    with pytest.raises(OSError, match="before row 10"):
        file.read(0, 10, torch.device("cpu"))
    writer.join()
    os.close(fd)


@pytest.fixture
def in_a_thread(monkeypatch):
    """Replays run in a thread, as on a GPU, whose streams are left out: on a cpu work is done when a call returns."""
    stream = SimpleNamespace(
        record_event=lambda: None, wait_event=lambda _: None, wait_stream=lambda _: None, synchronize=lambda: None
    )
    for name in ("Stream", "current_stream", "default_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(LayerwiseReplay, "_load_kernels", lambda *_: None)
    loading = LayerwiseReplay.loading
    monkeypatch.setattr(LayerwiseReplay, "loading", lambda self, _: loading(self, SELECTOR))


@pytest.mark.usefixtures("in_a_thread")
def test_a_replay_in_a_thread_leaves_what_the_steps_leave():
    test_a_replay_leaves_what_the_steps_leave("qwen35")


@pytest.mark.usefixtures("in_a_thread", "no_thread_begins")
def test_a_replay_whose_thread_finds_no_memory_to_begin_leaves_a_stage_without_sequences():
    spec = golden_spec("qwen35")
    plan = plans_of(spec)[0]
    load = load_of(stages=[plan], replay=[StageReplay(0, steps_of(spec))])
    [replay] = layerwise_replays(load, spec, file_of(torch.empty(0, spec.boundary_width), 0)).values()
    loaded(spec, plan, load, replay)
    assert "'replay_0' did not begin" in replay.problem
    assert replay.sequences is None


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, pytest.param(Dtype.BFLOAT16, marks=needs_cpu_kernels)])
def test_a_verify_slice_on_its_way_leaves_what_its_tokens_do_to_a_state(dtype: Dtype):
    """Its verdict comes when all stages are back, and with it the state is made."""
    spec = open_spec(DEMO)
    plan = StagePlan(0, [ShardPlan(0, LayerRange(0, 2))], None, 0, embedding=True, output=False)
    opening = [OpenSequence(0, 0, SamplingParams()), ZeroState(0), SetPages(0, KvGroup.FULL, 0, [1])]
    prompt = Slice(0, 0, tokens(1, 9), sample=False)
    verify = Slice(0, 9, [7, 8, 9], sample=True, n_drafts=2, states=[0, 6, 4])
    steps = [Step(0, 0, opening), Step(1, 0, [], [prompt]), Step(2, 0, [], [verify])]
    load = load_of(stages=[plan], max_drafts=4, threads=1, replay=[StageReplay(0, steps)])
    pools = msgspec.structs.replace(POOLS, draft_states=3)
    load = msgspec.structs.replace(load, dtype=dtype, kv_dtype=dtype, pools=pools)
    right = loaded(spec, plan, load)
    for step in steps:
        right.apply(step.operations)
        right.forward(step, None)
    [replay] = layerwise_replays(load, spec, LocalFile(os.memfd_create("rows"))).values()
    found = loaded(spec, plan, load, replay)
    assert found.replayed(replay), replay.problem
    after = Step(3, 0, [UseState(0, 6)], [Slice(0, 11, [12], sample=False)])
    rows = []
    for stage in (right, found):
        stage.apply(after.operations)
        rows.append(stage.forward(after, None).rows.clone())
    assert torch.equal(*rows)
