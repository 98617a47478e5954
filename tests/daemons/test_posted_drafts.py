"""The first of two stages has a verify step before its drafts, and starts when the output stage's daemon tells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from daemons.draft import stage as stage_module
from daemons.draft.drafter import Drafts
from daemons.draft.jobs import PlaceholderDraft
from daemons.draft.stage import DraftJob, DraftStage
from daemons.kv.batch import Layout
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend
from lucevisor.protocol.codec import encode
from lucevisor.protocol.steps import (
    PENDING,
    DraftStep,
    Operation,
    Slice,
    Step,
    StepResult,
    UseState,
)
from tests.daemons.test_queued_steps import GREEDY, N_REGIONS, LateEvent, TwoStages, opening, two_stages
from tests.daemons.test_run_ahead import BACKENDS, Daemon
from tests.families.golden import opened
from tests.model.drafter_files import MTP

N, ROUNDS = 3, 8


def plain_tokens(daemon: Daemon, n: int) -> dict[int, list[int]]:
    """What each sequence draws without drafts."""
    for i in range(n):
        daemon.run([Slice(s, 5 + s + i, [drawn[-1]], True) for s, drawn in daemon.drawn.items()])
        daemon.settle()
    return daemon.drawn


def draft_partly_right(monkeypatch: pytest.MonkeyPatch, wanted: Mapping[int, Sequence[int]]) -> None:
    """Random drafters are never right: let the first i % 3 drafts of position i be, of what each sequence draws."""
    draft = DraftStage._draft

    def partly_right(stage: DraftStage, jobs: Sequence[DraftJob], hidden: Tensor) -> Drafts:
        found = draft(stage, jobs, hidden)
        for row, job in enumerate(jobs):
            at = job.position - 5 - job.slice.sequence + 1
            for i, token in enumerate(wanted[job.slice.sequence][at : at + job.position % 3]):
                found.tokens[row, i] = token
        return found

    draft_at, placeholder_draft, begins = DraftStage._draft_at, stage_module.placeholder_draft, dict[int, Tensor]()

    def noted(
        layouts: Sequence[Layout], drafts: Sequence[int], first_row: int, drawn: Tensor
    ) -> PlaceholderDraft | None:
        found = placeholder_draft(layouts, drafts, first_row, drawn)
        if found is not None:
            begins[id(found.layout)] = int(layouts[0].metadata[layouts[0].n_rows]) + found.row - first_row
        return found

    def partly_right_unseen(stage: DraftStage, layout: Layout, hidden: Tensor, index: Tensor) -> Drafts:
        """As ``partly_right``, of drafts whose position only the device knows."""
        found = draft_at(stage, layout, hidden, index)
        if (position := begins.pop(id(layout), None)) is not None:
            i, following = (x.to(position.device) for x in (torch.arange(N), torch.tensor(wanted[0])))
            found.tokens[0] = torch.where(i < position % 3, following[position - 4 + i], found.tokens[0])
        return found

    monkeypatch.setattr(DraftStage, "_draft", partly_right)
    monkeypatch.setattr(DraftStage, "_draft_at", partly_right_unseen)
    monkeypatch.setattr(stage_module, "placeholder_draft", noted)


@dataclass
class LateTimedEvent(LateEvent):
    def elapsed_time(self, _: LateEvent) -> float:
        return 3.0


class Supervisor:
    """Verifies N drafts of each sequence a step.  ``ahead``: sends a step before its drafts are known."""

    def __init__(self, both: TwoStages, ids: list[int], n_sequences: int, *, ahead: bool) -> None:
        self.both, self.ahead = both, ahead
        self.drawn: dict[int, list[int]] = {s: [] for s in range(n_sequences)}
        self.at = [0] * n_sequences
        self.states = [*range(n_sequences)]
        self.drafts: list[dict[int, list[int]]] = []
        self.reported: list[list[int]] = []  # by the first stage: what it started with
        prompts = [Slice(s, 0, ids[: 5 + s], True, num_draft_tokens=N) for s in self.drawn]
        self.send(Step(1, 1, [one for s in self.drawn for one in opening(both.spec, s, GREEDY)], prompts))
        for _ in range(ROUNDS):
            self.verify(self.answered())
        self.answered()
        self.drafted()

    def send(self, step: Step) -> None:
        self.step = step
        for stage in (0, 1):
            self.both.post(step, stage)
        self.both.links[1].send(encode(DraftStep(step), step.step_id, 2))

    def result(self, stage: int) -> StepResult:
        result = self.both.answer(min(stage, 1))
        assert isinstance(result, StepResult)
        assert result.stage == stage
        return result

    def answered(self) -> list[Operation]:
        """Wait for the verdict; the operations that follow from it."""
        self.reported.append([one.token for one in self.result(0).sampled])
        if self.ahead and len(self.reported) > 1:
            self.drafted()  # told before the first stage started
        sampled, operations = self.result(1).sampled, list[Operation]()
        for piece in self.step.slices:
            drawn = [one.token for one in sampled if one.sequence == piece.sequence]
            self.drawn[piece.sequence] += drawn
            self.at[piece.sequence] += piece.n_context + len(drawn) - 1
            if piece.states:
                self.states[piece.sequence] = piece.states[len(drawn) - 1]
                operations.append(UseState(piece.sequence, self.states[piece.sequence]))
        return operations

    def drafted(self) -> None:
        self.drafts.append({one.sequence: one.tokens for one in self.result(2).drafts})

    def verify(self, operations: list[Operation]) -> None:
        number = self.step.step_id + 1
        if not self.ahead:
            self.drafted()
        slices = []
        for s, drawn in self.drawn.items():
            drafts = [PENDING] * N if self.ahead else self.drafts[-1][s]
            others = [i for i in range(8 * s + 8, 8 * s + 16) if i != self.states[s]][:N]
            tokens, states = [drawn[-1], *drafts], [self.states[s], *others]
            slices.append(Slice(s, self.at[s], tokens, True, N, states, num_draft_tokens=N))
        drafts_of = self.step.step_id if self.ahead else 0
        self.send(Step(number, number % N_REGIONS, operations, slices, drafts_of=drafts_of))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_sequences", [1, 2])
@pytest.mark.parametrize("spin_s", [0.0, 0.05])
def test_tokens_and_drafts_are_those_of_steps_that_wait(
    spin_s: float, n_sequences: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend is Backend.CPU:
        for place in ("runner", "deferred", "draft.stage"):
            monkeypatch.setattr(f"daemons.{place}.recorded", lambda *_, **__: LateTimedEvent())
    spec, ids = open_spec(MTP), opened("qwen35").ids
    wanted = plain_tokens(Daemon.of(spec, ids, backend, [GREEDY] * n_sequences), (ROUNDS + 1) * (N + 1))
    draft_partly_right(monkeypatch, wanted)
    found = []
    for ahead in (False, True):
        with two_stages(spec, backend, spin_s, MTP) as both:
            both.runners[1].defers_drafts = spin_s > 0  # as on a GPU
            found.append(Supervisor(both, ids, n_sequences, ahead=ahead))
    seen, unseen = found
    assert unseen.drawn == seen.drawn
    assert unseen.drafts == seen.drafts
    for s, drawn in seen.drawn.items():
        assert drawn == wanted[s][: len(drawn)]
        assert len(drawn) > ROUNDS + 1  # some drafts were accepted
    assert seen.reported == [[]] * (ROUNDS + 1)
    started_with = [[token for own in drafts.values() for token in own] for drafts in unseen.drafts[:-1]]
    assert unseen.reported == [[], *started_with]
