"""Drafting of many streams: few steps tell what drafts cost and yield."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lucevisor.engine.drafting.controller import SpecDecodeController
from lucevisor.protocol.loading import DraftKind
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
    return Simulation(machine, [Drafter(chances) for _ in range(N)], SpecDecodeController(most, kind))


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
def test_useless_drafts_take_few_steps_of_120(name: str, jitter: float) -> None:
    """The first ones on a cold server, and when all streams are new."""
    first, *later = answers(streams(name, WRONG, jitter), 3)
    assert share(first) > 0.9
    for run in later:
        assert sum(width > 0 for width in run.widths) <= 6
        assert share(run) > 0.95


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


def test_drafts_that_become_good_are_found() -> None:
    simulation = quick(streams("mtp", WRONG))
    simulation.decode(1500)
    simulation.drafters[:] = [Drafter(RIGHT) for _ in range(N)]
    simulation.decode(700)
    run = simulation.decode(300)
    assert sum(width > 0 for width in run.widths) > 0.8 * len(run.widths)
