"""A verify step is launched behind the drafts it verifies, which the host does not know yet.

On a cpu the drafts count as copied only when somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from daemons.draft.drafter import Drafts
from daemons.draft.stage import DraftJob, DraftStage
from daemons.step_output import StepOutput
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend
from lucevisor.protocol.steps import PENDING, Drafted, DraftStep, Operation, Slice, Step, UseState
from tests.daemons.test_run_ahead import BACKENDS, DRAFTERS, GREEDY, Daemon
from tests.families.golden import opened
from tests.model.drafter_files import MTP, TARGET

N, ROUNDS, SEQUENCES = 3, 8, 2


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
    """A daemon that verifies N drafts a sequence; ``unseen``: before the host knows them."""

    daemon: Daemon
    unseen: bool
    waiting: StepOutput | None = None
    at: list[int] = field(default_factory=lambda: [5 + s for s in range(SEQUENCES)])
    drafts: list[list[Drafted]] = field(default_factory=list)
    states: list[int] = field(default_factory=lambda: [*range(SEQUENCES)])
    n_settled_late: int = 0

    def settle(self) -> None:
        output, self.waiting = self.waiting, None
        if output is not None:
            self.n_settled_late += output.deferred is not None
            self.drafts.append(self.daemon.runner.settle(output).result.drafts)

    def run(self, number: int) -> None:
        runner, slices, operations = self.daemon.runner, list[Slice](), list[Operation]()
        if not self.unseen:
            self.settle()
        for s in range(SEQUENCES):
            operations.append(UseState(s, self.states[s]))
            pend = [PENDING] * N
            drafts = pend if self.unseen or not self.drafts else self.drafts[-1][s].tokens
            first = number == 0
            others = [i for i in range(8 * s + 8, 8 * s + 16) if i != self.states[s]][:N]
            tokens = [self.daemon.drawn[s][-1], *([] if first else drafts)]
            states = [] if first else [self.states[s], *others]
            slices.append(Slice(s, self.at[s], tokens, True, 0 if first else N, states, n_ahead=N))
        step = Step(100 + number, 0, operations if number else [], slices)
        found = runner.run_step(step, 0, 0.0, queued=self.settle)
        assert found.deferred is None
        for s in range(SEQUENCES):
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
        daemon.run([Slice(s, 5 + s + i, [daemon.drawn[s][-1]], True) for s in range(SEQUENCES)])
        daemon.settle()
    return daemon.drawn


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_and_drafts_are_those_of_steps_that_wait(
    name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend is Backend.CPU:
        monkeypatch.setattr("daemons.draft.stage.recorded", lambda *_, **__: AwaitedEvent())
        monkeypatch.setattr("daemons.deferred.recorded", lambda *_, **__: AwaitedEvent())
    spec, ids = open_spec(MTP if name == "qwen35_mtp_draft" else TARGET), opened("qwen35").ids
    wanted = plain_tokens(Daemon.of(spec, ids, backend, [GREEDY] * SEQUENCES), ROUNDS * (N + 1))
    draft = DraftStage._draft

    def partly_right(stage: DraftStage, jobs: Sequence[DraftJob], hidden: Tensor) -> Drafts:
        """Random drafters are never right: the first i % 3 drafts of position i are."""
        found = draft(stage, jobs, hidden)
        for row, job in enumerate(jobs):
            at = job.position - 5 - job.slice.sequence + 1
            for i, token in enumerate(wanted[job.slice.sequence][at : at + job.position % 3]):
                found.tokens[row, i] = token
        return found

    monkeypatch.setattr(DraftStage, "_draft", partly_right)
    both = []
    for unseen in (False, True):
        daemon = Daemon.of(spec, ids, backend, [GREEDY] * SEQUENCES, DRAFTERS[name])
        daemon.runner._defers_drafts = unseen
        both.append(Verifying(daemon, unseen))
    for one in both:
        for number in range(ROUNDS):
            one.run(number)
        one.settle()
    seen, unseen_one = both
    assert unseen_one.daemon.drawn == seen.daemon.drawn
    assert [[d.tokens for d in made] for made in unseen_one.drafts] == [
        [d.tokens for d in made] for made in seen.drafts
    ]
    assert unseen_one.n_settled_late == ROUNDS
    for s, drawn in seen.daemon.drawn.items():
        assert len(drawn) > ROUNDS + 1  # some drafts were accepted
        assert drawn == wanted[s][: len(drawn)]
    assert torch.allclose(
        torch.tensor([d.probabilities for made in seen.drafts for d in made]),
        torch.tensor([d.probabilities for made in unseen_one.drafts for d in made]),
        atol=1e-4,
    )
