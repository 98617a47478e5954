"""A verify step is launched behind the drafts it verifies, which the host does not know yet.

On a cpu the drafts count as copied only when somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from daemons.draft import stage as stage_module
from daemons.draft.drafter import Drafts
from daemons.draft.jobs import PlaceholderDraft
from daemons.draft.stage import DraftJob, DraftStage
from daemons.kv.batch import Layout
from daemons.step_output import StepOutput
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend
from lucevisor.protocol.steps import PENDING, Drafted, DraftStep, Operation, Slice, Step, UseState
from tests.daemons.test_run_ahead import BACKENDS, DRAFTERS, GREEDY, Daemon
from tests.families.golden import opened
from tests.model.drafter_files import MTP, TARGET

N, ROUNDS = 3, 8


@dataclass
class AwaitedEvent:
    """Stands for a device's event that is over when somebody waits for it."""

    over: bool = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True

    def elapsed_time(self, _: AwaitedEvent) -> float:
        return 3.0


@dataclass
class Verifying:
    """A daemon that verifies N drafts a sequence; ``unseen``: before the host knows them; ``ahead``: whose draft stage
    hears of a step before its tokens are known.
    """

    daemon: Daemon
    unseen: bool
    ahead: bool
    n_sequences: int
    waiting: StepOutput | None = None
    at: list[int] = field(default_factory=lambda: [5, 6])
    drafts: list[list[Drafted]] = field(default_factory=list)
    states: list[int] = field(default_factory=lambda: [0, 1])
    n_settled_late: int = 0
    n_extended: int = 0
    n_begun: int = 0

    def settle(self) -> None:
        output, self.waiting = self.waiting, None
        if output is not None:
            self.n_settled_late += output.deferred is not None
            self.drafts.append(self.daemon.runner.settle(output).result.drafts)

    def run(self, number: int) -> None:
        runner, slices, operations = self.daemon.runner, list[Slice](), list[Operation]()
        if not self.unseen:
            self.settle()
        for s in range(self.n_sequences):
            operations.append(UseState(s, self.states[s]))
            pend = [PENDING] * N
            drafts = pend if self.unseen or not self.drafts else self.drafts[-1][s].tokens
            first = number == 0
            others = [i for i in range(8 * s + 8, 8 * s + 16) if i != self.states[s]][:N]
            tokens = [self.daemon.drawn[s][-1], *([] if first else drafts)]
            states = [] if first else [self.states[s], *others]
            slices.append(Slice(s, self.at[s], tokens, True, 0 if first else N, states, num_draft_tokens=N))
        step = Step(100 + number, 0, operations if number else [], slices)
        if self.ahead:
            runner.draft_step = {step.step_id: DraftStep(step)}.get
        found = runner.run_step(step, 0, 0.0, queued=self.settle)
        if runner._draft.has_extended(step):
            self.n_extended += 1
            self.n_begun += runner._draft._ahead.drafts is not None
        assert found.deferred is None
        for s in range(self.n_sequences):
            drawn = [one.token for one in found.result.sampled if one.sequence == s]
            self.daemon.drawn[s] += drawn
            self.at[s] += len(drawn)
            if slices[s].states:
                self.states[s] = slices[s].states[len(drawn) - 1]
        self.settle()
        self.waiting = runner.run_draft(DraftStep(step), 0.0)
        assert (self.waiting.deferred is not None) == self.unseen


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_sequences", [1, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_and_drafts_are_those_of_steps_that_wait(
    name: str, n_sequences: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend is Backend.CPU:
        monkeypatch.setattr("daemons.draft.stage.recorded", lambda *_, **__: AwaitedEvent())
        monkeypatch.setattr("daemons.deferred.recorded", lambda *_, **__: AwaitedEvent())
        monkeypatch.setattr(DraftStage, "extends_ahead", lambda *_: True)
    spec, ids = open_spec(MTP if name == "qwen35_mtp_draft" else TARGET), opened("qwen35").ids
    wanted = plain_tokens(Daemon.of(spec, ids, backend, [GREEDY] * n_sequences), ROUNDS * (N + 1))
    draft_partly_right(monkeypatch, wanted)
    ways = []
    for unseen, ahead in ((False, False), (True, False), (True, True)):
        daemon = Daemon.of(spec, ids, backend, [GREEDY] * n_sequences, DRAFTERS[name])
        daemon.runner.defers_drafts = unseen
        ways.append(Verifying(daemon, unseen, ahead, n_sequences))
    for one in ways:
        for number in range(ROUNDS):
            one.run(number)
        one.settle()
    seen = ways[0]
    for one in ways:
        assert one.daemon.drawn == seen.daemon.drawn
        assert [[d.tokens for d in made] for made in one.drafts] == [[d.tokens for d in made] for made in seen.drafts]
        assert one.n_settled_late == ROUNDS * one.unseen
        assert one.n_extended == ROUNDS * one.ahead
        many = backend is not Backend.CPU and n_sequences == 1 and one.ahead
        assert (ROUNDS - 4) * many <= one.n_begun <= ROUNDS * (one.ahead and backend is not Backend.CPU)
    for s, drawn in seen.daemon.drawn.items():
        assert len(drawn) > ROUNDS + 1  # some drafts were accepted
        assert drawn == wanted[s][: len(drawn)]
    wanted_chances, *chances = (torch.tensor([d.probabilities for made in o.drafts for d in made]) for o in ways)
    assert all(torch.allclose(wanted_chances, found, atol=1e-4) for found in chances)
