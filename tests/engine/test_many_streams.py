"""Drafting of many streams: few steps tell what drafts cost and yield, and useless ones are tried ever more seldom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from lucevisor.engine.drafting.budget import MOST_PROBES
from lucevisor.engine.drafting.costs import MANY_SLICES, MOST_COLD, PRIORS, BatchCosts, DraftTimes, Round
from lucevisor.engine.drafting.probes import PROBE_STEPS, Probes, WidthProbe
from lucevisor.engine.drafting.request import RequestDrafts
from lucevisor.engine.drafting.speculation import Speculation
from lucevisor.protocol.loading import DraftKind
from lucevisor.protocol.steps import Drafted
from tests.combinations import combinations
from tests.engine.draft_simulation import Drafter, Machine, Run, Simulation, streams_dflash, streams_mtp

N = 16
RIGHT = [1.0, 1.0, 0.0]
"""Two drafts are right, and no more."""
WRONG = [0.0]
MACHINES: dict[str, tuple[Callable[[float], Machine], DraftKind, int]] = {
    "mtp": (streams_mtp, DraftKind.MTP, 15),
    "dflash": (streams_dflash, DraftKind.DFLASH, 7),
}


def streams(name: str, chances: list[float], jitter: float = 0.03, *, warm: bool = True) -> Simulation:
    """``warm``: the graphs of all shapes are there."""
    make, kind, most = MACHINES[name]
    machine = replace(make(jitter), first_s=0.0) if warm else make(jitter)
    return Simulation(machine, [Drafter(chances) for _ in range(N)], Speculation(most, kind))


def quick(simulation: Simulation) -> Simulation:
    """The same with drafts that pay by more than estimates are unsure of."""
    simulation.machine = replace(simulation.machine, draft_s=lambda slices, n: 0.0005, wait_s=0.001)
    return simulation


def answers(simulation: Simulation, n: int, n_tokens: int = 120) -> list[Run]:
    """``n`` times all streams end and as many others decode ``n_tokens`` each."""
    runs = []
    for _ in range(n):
        simulation.replace([replace(one) for one in simulation.drafters])
        runs.append(simulation.decode(n_tokens))
    return runs


def share(run: Run) -> float:
    """Its rate over that of plain decoding."""
    return run.plain_s / run.seconds


@combinations(name=MACHINES, jitter=[0.0, 0.03, 0.1])
def test_useless_drafts_take_two_steps_of_120_at_most(name: str, jitter: float) -> None:
    """The first ones on a cold server, and when all streams are new."""
    for run in answers(streams(name, WRONG, jitter), 3):
        assert sum(width > 0 for width in run.widths) <= 2
        assert sum(n > 0 for n in run.asked) <= 2, "none are asked for behind the step that verifies some"
        assert share(run) > 0.97


@pytest.mark.parametrize("name", MACHINES)
def test_good_drafts_are_no_slower_than_plain_decoding(name: str) -> None:
    """Also while widths that are too wide are tried.  With a draft stage as fast as an MTP head they pay."""
    runs = answers(streams(name, RIGHT), 3)
    assert min(map(share, runs)) > 0.99
    if name == "mtp":
        assert min(map(share, runs)) > 1.02


@pytest.mark.parametrize("name", MACHINES)
def test_good_drafts_are_found_though_their_graphs_are_captured_first(name: str) -> None:
    """What the first two steps of a shape take is not taken for what such steps cost."""
    simulation = quick(streams(name, RIGHT, warm=False))
    first, *later = answers(simulation, 3)
    assert sum(width > 0 for width in first.widths) > 40
    assert min(map(share, later)) > 1.1


@pytest.mark.parametrize("name", MACHINES)
def test_useless_drafts_are_tried_ever_more_seldom(name: str) -> None:
    run = streams(name, WRONG).decode(4000)
    tried = [at for at, width in enumerate(run.widths) if width]
    waits = [b - a for a, b in pairwise(tried)]
    most = 1.1 * 100 * MOST_PROBES  # steps that earn it
    assert len(waits) >= 4
    assert all(later > 1.5 * wait or later > 0.8 * most for wait, later in pairwise(waits))
    assert max(waits) < most
    assert share(run) > 0.99


def test_drafts_that_become_good_are_found() -> None:
    simulation = quick(streams("mtp", WRONG))
    simulation.decode(1500)
    simulation.drafters[:] = [Drafter(RIGHT) for _ in range(N)]
    simulation.decode(700)
    run = simulation.decode(300)
    assert sum(width > 0 for width in run.widths) > 0.8 * len(run.widths)


def test_of_many_slices_no_width_is_used_before_it_was_tried() -> None:
    """One more draft at a time; a prior does not tell what 64 rows take."""
    widths = streams("mtp", [0.95], warm=True).decode(400).widths
    tried = sorted(set(widths), key=widths.index)
    assert tried[0] == 0
    assert all(n <= 1 + max(tried[:i]) for i, n in enumerate(tried) if i)


# ---- single decisions


def decoding(n: int = N, n_steps: int = 4) -> tuple[Speculation, list[RequestDrafts]]:
    """A policy that knows what plain decoding takes: 10 ms."""
    policy, requests = Speculation(7, DraftKind.MTP), [RequestDrafts(f"r{i}") for i in range(n)]
    for _ in range(n_steps):
        policy.measured(n, n, 0.01)
    return policy, requests


def ask(policy: Speculation, requests: list[RequestDrafts]) -> set[int]:
    return {policy.n_ahead(one, len(requests)) for one in requests}


def verify(policy: Speculation, requests: list[RequestDrafts], n: int) -> set[int]:
    offered = [(one, Drafted(i, [1] * n)) for i, one in enumerate(requests)]
    return {*policy.n_verify(offered, len(requests)).values()}


def test_a_probe_of_many_slices_is_one_warm_step() -> None:
    policy, requests = decoding()
    assert ask(policy, requests) == {1}
    assert verify(policy, requests, 1) == {1}
    assert ask(policy, requests) == {0}
    for one in requests:
        policy.verified(one, 1, 1)
    policy.measured(2 * N, N, 0.06, cold=True)
    assert policy.probes.running is not None, "a cold step tells nothing of what such steps take"
    assert ask(policy, requests) == {1}
    assert verify(policy, requests, 1) == {1}
    policy.measured(2 * N, N, 0.012)
    assert policy.probes.running is None
    assert ask(policy, requests) != {0}


def test_a_probe_in_vain_ends_with_its_verdicts() -> None:
    """Even if its step was cold: what a step with such drafts takes does not matter."""
    policy, requests = decoding()
    assert ask(policy, requests) == {1}
    assert verify(policy, requests, 1) == {1}
    for one in requests:
        policy.verified(one, 1, 0)
    assert ask(policy, requests) == {0}
    assert policy.probes.running is None
    for _ in range(20):
        policy.measured(N, N, 0.01)
        assert ask(policy, requests) == {0}


def test_a_probe_of_few_slices_is_three_steps() -> None:
    for n_slices in (1, MANY_SLICES - 1):
        probes = Probes()
        assert probes.begin(WidthProbe(n_slices, 2, expected=1.0), PROBE_STEPS)
        ended = [probes.stepped(3 * n_slices, n_slices, fewer=False, cold=True) for _ in range(PROBE_STEPS)]
        assert ended == [False, False, True]


def test_a_check_in_vain_waits_until_twice_its_cost_is_earned_and_then_twice_as_long() -> None:
    probes, waited = Probes(), []
    for _ in range(8):
        assert probes.begin(WidthProbe(N, 1, expected=0.3, lost=0.5, is_check=True), 1)
        assert probes.running is not None
        probes.running.n_verify(1, N)
        probes.verified(0, N)
        probes.judge(lambda width: False)
        n = 0
        while not probes.begin(WidthProbe(N, 1, expected=0.3, lost=0.0, is_check=True), 1):
            probes.earn(1.0)
            n += 1
        probes.running = None
        waited.append(n)
    assert waited[:2] == pytest.approx([160, 320], abs=2)
    assert waited[2:] == pytest.approx([600] * 6, abs=2)


def test_verdicts_on_other_widths_are_not_those_of_a_probe() -> None:
    """They come while it waits for its own: fewer drafts than it expects to be accepted."""
    probes = Probes()
    probes.begin(WidthProbe(N, 4, expected=3.0), 1)
    before = probes._budget.balance
    for _ in range(N):
        assert not probes.verified(1, N)
    assert probes._budget.balance == before
    assert probes.running is not None
    probes.running.n_verify(4, N)
    assert probes.verified(1, N)
    assert probes._budget.balance == before - 2 / N


def test_what_waited_for_drafts_is_charged_to_drafting_though_it_verifies_none() -> None:
    """The gap before it: plain decoding runs ahead and has none."""
    lost = []
    for waited in (False, True):
        policy, _ = decoding()
        policy.times.add_gap(Round.PLAIN, 0.0)
        policy.times.add_gap(Round.UNSEEN, 0.005)
        before = policy._loss.balance
        policy.measured(N, N, 0.01, waited=waited)
        lost.append(before - policy._loss.balance)
    assert lost[0] < 0 < lost[1]
    assert lost[1] == pytest.approx(1.03 * 1.5 - 1, abs=0.03)


@pytest.mark.parametrize("n_slices", [1, N])
def test_a_cold_step_is_charged_what_such_steps_take(n_slices: int) -> None:
    policy, _ = decoding(n_slices)
    for _ in range(4):
        policy.measured(2 * n_slices, n_slices, 0.01)
        policy.measured_draft(n_slices, 1, 0.001)
    before = policy._loss.balance
    policy.measured(2 * n_slices, n_slices, 0.2, cold=True)
    policy.measured_draft(n_slices, 1, 0.2, cold=True)
    assert before - policy._loss.balance < 0.2
    assert policy.times.steps.seconds(2 * n_slices, n_slices) == pytest.approx(0.01)
    assert policy.times.drafts.seconds(1, n_slices) == pytest.approx(0.001)


def test_of_many_slices_the_first_step_that_is_not_cold_counts_at_once() -> None:
    times = DraftTimes(PRIORS[DraftKind.MTP])
    times.add_step(2 * N, N, 0.05, cold=True)
    assert times.steps.n_known(2 * N, N) == 0
    times.add_step(2 * N, N, 0.015)
    assert (times.steps.n_known(2 * N, N), times.steps.seconds(2 * N, N)) == (1, 0.015)
    alone = DraftTimes(PRIORS[DraftKind.MTP])
    alone.add_step(4, 1, 0.05, cold=True)
    assert alone.steps.seconds(4, 1) == 0.05, "of one slice it tells what they take at most"
    alone.add_step(4, 1, 0.015)
    assert alone.steps.n_known(4, 1) == 0


def test_steps_that_are_always_cold_count() -> None:
    """There may be no memory for their graphs."""
    times = DraftTimes(PRIORS[DraftKind.MTP])
    for _ in range(MOST_COLD + 3):
        times.add_step(2 * N, N, 0.05, cold=True)
    assert times.steps.seconds(2 * N, N) == 0.05


def test_one_step_of_many_unequal_slices_tells_what_they_take() -> None:
    times = DraftTimes(PRIORS[DraftKind.MTP])
    times.add_step(N, N, 0.01)
    times.add_step(2 * N, N, 0.01)
    times.add_step(2 * N - 1, N, 0.06)
    assert times.uneven_ratio == pytest.approx(6.0)


def test_a_request_that_ends_does_not_make_slices_unequal_where_that_costs_much() -> None:
    policy, _ = decoding()
    assert policy.evened([1] * 15 + [0], [1] * N) == [1] * 15 + [0], "not known yet"
    policy.measured(2 * N, N, 0.01)
    policy.measured(2 * N - 1, N, 0.06)
    assert policy.evened([1] * 15 + [0], [1] * N) == [0] * N
    assert policy.evened([2] * 15 + [1], [2] * N) == [1] * N
    assert policy.evened([1] * 15 + [0], [1] * 15 + [0]) == [1] * 15 + [0], "each has its own"
    assert policy.evened([1, 0], [1, 1]) == [1, 0]


def test_more_drafts_of_many_slices_are_free_only_if_they_were_measured_so() -> None:
    """DFlash drafts a block in one pass, but 16 blocks are not as fast as one."""
    times = DraftTimes(PRIORS[DraftKind.DFLASH])
    assert BatchCosts(times, 1, 0.01).with_free(1, 7) > 1
    assert BatchCosts(times, N, 0.01).with_free(1, 7) == 1
    for n in (1, 2, 3):
        times.add_draft(n, N, 0.001 if n < 3 else 0.003)
    assert BatchCosts(times, N, 0.01).with_free(1, 7) == 2
