"""Drafts of a cpu that are captured have the bits of those that are not: the demo's drafters beside the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemons.draft.stage import DraftStage
from daemons.models.stage import LoadedStage
from lucevisor.model.drafters import open_draft, read_draft_spec
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import CaptureSource, DraftKind, DraftPlan, Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.steps import (
    CloseSequence,
    CopyState,
    Drafted,
    OpenSequence,
    SamplingParams,
    SetPages,
    Slice,
    Step,
    UseState,
    ZeroState,
)
from tests.daemons.cpu_kernels import needs_cpu_kernels

pytestmark = needs_cpu_kernels
DEMO = Path(__file__).parents[2] / "etc" / "demo"
MODEL = DEMO / "demo-qwen35-22m-q4_k_m.gguf"
DRAFTERS = {
    DraftKind.DFLASH: DEMO / "demo-qwen35-22m-dflash2-q4_0.gguf",
    DraftKind.MTP: DEMO / "demo-qwen35-22m-mtp-q8_0.gguf",
}
IDS = [(i * 37 + 5) % 8000 for i in range(80)]


class Service:
    """The demo model with a drafter, both in this process."""

    def __init__(self, kind: DraftKind) -> None:
        spec, path = open_spec(MODEL), str(DRAFTERS[kind])
        drafter = read_draft_spec(open_draft((DRAFTERS[kind],)), spec, kind, {})
        layers = LayerRange(0, spec.n_layers)
        captures = [*drafter.captures]
        plan = StagePlan(0, [ShardPlan(0, layers)], None, None, True, True, captures=captures)
        load = Load(
            [str(MODEL)], Dtype.BFLOAT16, Dtype.BFLOAT16, [plan], [], PoolSizes(40, 0, 40), 4, 256, 1, {}, max_drafts=7,
            draft=DraftPlan(1, kind, [path], 0, drafter.layers, [CaptureSource(0, captures, None)]),
        )  # fmt: skip
        self.stage = LoadedStage.load(spec, plan, load, Backend.CPU, lambda _: None)
        self.draft = DraftStage.load(spec, load, Backend.CPU, lambda _: None, self.stage)
        self.lengths: dict[int, int] = {}

    def apply(self, *operations) -> None:
        self.stage.apply(operations)
        self.draft.apply(operations)

    def open(self, sequence: int) -> None:
        states = [ZeroState(sequence * 10 + i) for i in range(10)]
        pages = SetPages(sequence, KvGroup.FULL, 0, list(range(sequence * 5, sequence * 5 + 5)))
        self.apply(*states, OpenSequence(sequence, sequence * 10, SamplingParams()), pages)
        self.lengths[sequence] = 0

    def run(self, num_draft_tokens: int, *parts: tuple[int, list[int], int], accepted: int = 0) -> list[Drafted]:
        """A step of (sequence, tokens, drafts among them); of each ``accepted`` drafts are kept, then drafts come."""
        slices, sampled = [], []
        for sequence, tokens, n_drafts in parts:
            states = [sequence * 10 + i for i in range(n_drafts + 1)] if n_drafts else []
            slices.append(
                Slice(
                    sequence, self.lengths[sequence], tokens, True, n_drafts, states, num_draft_tokens=num_draft_tokens
                )
            )
            sampled.append(tokens[: accepted + 1])
            self.lengths[sequence] += len(tokens) - n_drafts + accepted
        step = Step(1, 0, [], slices)
        out = self.stage.forward(step, None)
        assert out.captures is not None
        found = self.draft.run(step, [out.captures], sampled)
        for sequence, _, n_drafts in parts:
            if n_drafts:
                kept = 10 * sequence + accepted
                self.apply(CopyState(kept, 10 * sequence), UseState(sequence, 10 * sequence))
        return found


def text(service: Service) -> list[Drafted]:
    """Prompts, decodes whose rows wait, drafts of several widths, alone and of two sequences."""
    found: list[Drafted] = []
    service.open(0)
    found += service.run(3, (0, IDS[:40], 0))
    for token in IDS[:3]:
        service.run(0, (0, [token], 0))
    for accepted in (2, 0, 7, 2, 7):
        found += service.run(7, (0, IDS[accepted : accepted + 8], 7), accepted=accepted)
    for token in IDS[:4]:
        found += service.run(3, (0, [token], 0))
    service.open(1)
    found += service.run(7, (1, IDS[:9], 0))
    for accepted in (3, 5, 3):
        found += service.run(7, (0, IDS[9:17], 7), (1, IDS[20:28], 7), accepted=accepted)
    service.apply(CloseSequence(0))
    found += service.run(7, (1, IDS[4:12], 7), accepted=4)
    return found


@pytest.mark.parametrize("kind", DRAFTERS)
def test_captured_drafts_equal_eager_ones(kind: DraftKind) -> None:
    plain, captured = Service(kind), Service(kind)
    plain.stage.graphs, plain.draft.graphs = [None], None
    assert text(captured) == text(plain)
    graphs = captured.draft.graphs
    assert graphs is not None
    alone, both = {(1, 8), (1, 3), (1, 1)}, {(2, 4)}  # rows of rejected drafts are left out
    assert {(key.n_slices, key.n_tokens) for key in graphs.extend._graphs} == alone | both
    rows = {DraftKind.DFLASH: ({(1, 8), (1, 4), (2, 8)}, set()), DraftKind.MTP: ({(1, 7), (1, 3)}, {(2, 7)})}
    drafts, eager = rows[kind]
    assert {(key.n_slices, key.n_tokens) for key in graphs.draft._graphs} == drafts
    assert {(key.n_slices, key.n_tokens) for key in graphs.draft._uncapturable} == eager
