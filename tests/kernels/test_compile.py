"""Kernels become machine code for every target, without a GPU: one case a kind always, all cases in ``make kernels``.

What is compiled is kept in build/triton, by the hash of its source (Triton's own key): a second run compiles nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lucevisor.model.quant_types import REPACKED
from tests.kernels.targets import TARGETS, cases, dealt, kinds

pytest.importorskip("triton")

CACHE = Path(__file__).parents[2] / "build" / "triton"


def compile_for(*arguments: str) -> list[dict[str, Any]]:
    """A process of its own, since this one runs kernels under the interpreter; a report for each target."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment.setdefault("TRITON_CACHE_DIR", str(CACHE))
    command = [sys.executable, "-m", "tests.kernels.targets", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    for report in reports:
        assert report["cases"]
        assert report["failures"] == {}, report["target"]
    return reports


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str) -> None:
    compile_for(target)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("half", [0, 1])  # on one core each
def test_one_case_a_kind_compiles(half: int) -> None:
    targets = list(TARGETS)[half::2]
    assert [report["target"] for report in compile_for("--few", *targets)] == targets


def test_the_few_are_of_every_kernel_and_quant_type() -> None:
    hands = dealt(cases())
    few = [case for hand in hands.values() for case in hand]
    assert set().union(*map(kinds, few)) == set().union(*map(kinds, cases()))
    assert {name for what, name in set().union(*map(kinds, few)) if what == "quant type"} == REPACKED
    assert all(hands.values()), "a target compiles nothing"
    assert all(target in case.targets for target, hand in hands.items() for case in hand)
