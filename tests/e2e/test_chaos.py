"""`lucevisor chaos` with the demo; a long run is in docs/reliability.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lucevisor.chaos.faults import FAULTS
from tests.e2e.process import DEMO, Cli


@pytest.mark.slow  # the parts: tests/chaos
@pytest.mark.timeout(300)
def test_random_faults_change_no_answer_and_lose_none(cli: Cli) -> None:
    done = cli.run("chaos", "--minutes", "0.5", "--seed", "11", "--json", timeout_s=280, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert set(report["faults"]) == set(FAULTS)
    assert sum(row["times"] for row in report["faults"].values()) >= 4
    assert report["answers"]["right"] > 5
    assert (report["answers"]["wrong"], report["answers"]["lost"], report["left"]) == ([], [], [])


def test_a_start_with_fault_hooks_is_refused(cli: Cli) -> None:
    env = cli.env | {"LUCEVISOR_FAULTS": str(cli.runtime)}
    command = [sys.executable, "-m", "lucevisor", "start", str(DEMO), "--name", "t", "--set", "server.port=0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "it is for `lucevisor chaos`" in done.stderr
    assert not os.path.exists(cli.socket())
