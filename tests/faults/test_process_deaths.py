"""Daemons that die, and the supervisor that dies: who notices, who follows, what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lucevisor.protocol.steps import Step
from lucevisor.supervision.group import RefusedError
from lucevisor.supervision.states import State
from tests.supervision.real_groups import (
    brisk,
    open_descriptors,
    ready,
    runs,
    stage_tiny,
    tiny_group,
    until,
    zombies,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("how", ["exit at start", "exit at progress", "abort at load"])
async def test_death_before_ready_is_noticed_at_once_and_retried(tmp_path, how):
    async with tiny_group(tmp_path, how, TINY_ONCE=str(tmp_path / "once")) as (group, owner):
        began = time.monotonic()
        await group.start()
        await group.wait(State.BACKOFF, timeout_s=60)
        assert time.monotonic() - began < 15.0  # no deadline had to pass
        ended = "killed by signal 6 (SIGABRT)" if "abort" in how else f"exited with code 3: tiny ends at {how[8:]}"
        assert ended in group.reason
        await ready(group, n_restarts=1)
    assert owner.news == ["ready", "lost"]  # nobody was told of the first


@pytest.mark.parametrize("how", ["exit at ready"])
async def test_a_crash_loop_ends_in_failed_with_the_reason_and_restart_clears_it(tmp_path, how):
    async with tiny_group(tmp_path, how, limits=brisk(n_restarts=2)) as (group, owner):
        await group.start()
        await group.wait(State.FAILED, timeout_s=20)
        assert f"exited with code 3: tiny ends at {how[8:]}" in group.reason
        assert group.reason.endswith("restart limit 2/60s reached")
        assert owner.states.count(State.STARTING) == 3
        assert group.pid is None
        with pytest.raises(RefusedError, match="lucevisor restart left"):
            await group.start()
        await group.restart()
        await group.wait(State.FAILED, timeout_s=20)
        assert owner.states.count(State.STARTING) == 6  # the count began anew


@pytest.mark.parametrize("n_bytes", [15, 40])
async def test_killed_in_the_middle_of_a_frame_the_link_is_dead_and_the_group_restarts(tmp_path, n_bytes):
    once = str(tmp_path / "once")
    async with tiny_group(tmp_path, "cut at step", TINY_BYTES=str(n_bytes), TINY_ONCE=once) as (group, owner):
        await group.start()
        await ready(group)
        group.link.send(Step(7, 0))
        await ready(group, n_restarts=1)
        assert owner.frames == []  # half a result is no result
        group.link.send(Step(7, 0))
        await until(lambda: len(owner.frames) == 1)


def test_no_daemon_outlives_a_killed_supervisor(tmp_path):
    """By the kernel (deaf, and deep in a load), and without its help by the end of file on link or pulse."""
    behaviours = ["", "deaf", "sleep at load", "no deathsig", "no deathsig, sleep at load"]
    command = [sys.executable, "-m", "tests.supervision.tiny_supervisor", str(tmp_path), *behaviours]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    with supervisor:
        for line in supervisor.stdout:
            if line.startswith(b"["):
                break
        pids = json.loads(line)
        assert len(set(pids)) == len(behaviours)
        assert all(runs(pid) for pid in pids)
        supervisor.kill()
        deadline = time.monotonic() + 20.0
        while any(runs(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = {how: pid for how, pid in zip(behaviours, pids, strict=True) if runs(pid)}
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
        assert left == {}


def test_a_daemon_whose_parent_is_another_ends_at_once(tmp_path):
    staging = stage_tiny(tmp_path).directory
    command = [sys.executable, "-m", "daemons", "--group=g", "--backend=cpu", "--link=fd:0", "--pulse=fd:0"]
    command += ["--parent-pid=1", "--threads=0", "--cores=", "--rows="]
    ended = subprocess.run(command, cwd=staging, env={"PYTHONPATH": str(staging)}, capture_output=True, text=True)
    assert ended.returncode == 78
    assert "is not the parent of this daemon" in ended.stderr


async def test_descriptors_and_zombies_stay_flat_over_restarts(tmp_path):
    async with tiny_group(tmp_path, limits=brisk(n_restarts=10**6, backoff_max_s=0.01)) as (group, _):
        await group.start()
        await ready(group)
        before, before_zombies = open_descriptors(), zombies()  # of other tests in this process
        for n in range(1, 7):
            if n % 2:
                os.kill(group.pid, signal.SIGKILL)
            else:
                await group.restart(now=True)
            await ready(group, n_restarts=n)
        assert open_descriptors() == before
        assert zombies() <= before_zombies
        await group.stop()
        assert open_descriptors() < before
