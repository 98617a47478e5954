"""Daemons and supervisors that die, hang or are told to stop: who notices, who follows, what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lucevisor.protocol.steps import Step
from lucevisor.supervision.child import Child
from lucevisor.supervision.events import State
from lucevisor.supervision.group import RefusedError
from lucevisor.supervision.launcher import Launcher
from tests.supervision.real_groups import (
    brisk,
    exists,
    open_descriptors,
    ready,
    ready_group,
    runs,
    stage_tiny,
    tiny_group,
    zombies,
)
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("how", ["exit at start", "exit at progress", "abort at load"])
async def test_death_before_ready_is_noticed_at_once_and_retried(tmp_path, how):
    async with tiny_group(tmp_path, how, TINY_ONCE=str(tmp_path / "once")) as (group, owner):
        began = time.monotonic()
        await group.start()
        await group.wait(State.BACKOFF, timeout_s=100)
        assert time.monotonic() - began < 15.0  # no deadline had to pass
        ended = "killed by signal 6 (SIGABRT)" if "abort" in how else f"exited with code 3: tiny ends at {how[8:]}"
        assert ended in group.reason
        await ready(group, n_restarts=1)
    assert owner.news == ["ready", "lost"]  # nobody was told of the first


async def test_a_crash_loop_ends_in_failed_with_the_reason_and_restart_clears_it(tmp_path):
    async with tiny_group(tmp_path, "exit at ready", limits=brisk(n_restarts=2)) as (group, owner):
        await group.start()
        await group.wait(State.FAILED, timeout_s=100)
        assert "exited with code 3: tiny ends at ready" in group.reason
        assert group.reason.endswith("restart limit 2/60s reached")
        assert owner.states.count(State.STARTING) == 3
        assert group.pid is None
        with pytest.raises(RefusedError, match="lucevisor restart left"):
            await group.start()
        await group.restart()
        await group.wait(State.FAILED, timeout_s=100)
        assert owner.states.count(State.STARTING) == 6  # the count began anew


@pytest.mark.parametrize("n_bytes", [15, 40])
async def test_killed_in_the_middle_of_a_frame_the_link_is_dead_and_the_group_restarts(tmp_path, n_bytes):
    once = str(tmp_path / "once")
    async with ready_group(tmp_path, "cut at step", TINY_BYTES=str(n_bytes), TINY_ONCE=once) as (group, owner):
        group.link.send(Step(7, 0))
        await ready(group, n_restarts=1)
        assert owner.frames == []  # half a result is no result
        group.link.send(Step(7, 0))
        await until(lambda: len(owner.frames) == 1)


def test_no_daemon_outlives_a_killed_supervisor(tmp_path):
    """By the kernel (deaf, and deep in a load), and without its help by the end of file on link or heartbeat."""
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
        deadline = time.monotonic() + 60.0
        while any(runs(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = {how: pid for how, pid in zip(behaviours, pids, strict=True) if runs(pid)}
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
        assert left == {}


def test_a_daemon_whose_parent_is_another_ends_at_once(tmp_path):
    staging = stage_tiny(tmp_path).directory
    command = [sys.executable, "-m", "daemons", "--group=g", "--backend=cpu", "--link=fd:0", "--heartbeat=fd:0"]
    command += ["--parent-pid=1", "--threads=0", "--cores=", "--rows=", "--secret="]
    ended = subprocess.run(command, cwd=staging, env={"PYTHONPATH": str(staging)}, capture_output=True, text=True)
    assert ended.returncode == 78
    assert "is not the parent of this daemon" in ended.stderr


async def test_descriptors_and_zombies_stay_flat_over_restarts(tmp_path):
    async with ready_group(tmp_path, limits=brisk(n_restarts=10**6, backoff_max_s=0.01)) as (group, _):
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


# ---- hangs


def output_of(logs, pid: int) -> list[str]:
    """What a daemon wrote, from the structured log."""
    return [entry["line"] for entry in logs if entry["event"] == "output" and entry["pid"] == pid]


async def test_a_stopped_daemon_is_detected_asked_for_its_stacks_killed_and_restarted(tmp_path):
    limits = brisk(heartbeat_s=1.5, busy_heartbeat_s=1.5, stacks_s=2.0)
    with capture_logs() as logs:
        async with ready_group(tmp_path, limits=limits) as (group, owner):
            first = group.pid
            # it waits for messages: its stacks could be those of the end of its load
            await until(lambda: group.heartbeat and group.heartbeat.phase == "idle")
            os.kill(first, signal.SIGSTOP)
            await until(lambda: group.state is State.STOPPING)
            assert "no heartbeat" in group.reason
            await ready(group, n_restarts=1)
            assert not exists(first)
    assert "no heartbeat" in owner.lost[0]
    assert any("in receive" in line for line in output_of(logs, first))
    assert [entry["to"] for entry in logs if entry["event"] == "signal"][:2] == ["stacks", "kill"]


async def test_a_daemon_that_hangs_with_the_interpreter_lock_gives_its_stacks(tmp_path):
    limits = brisk(heartbeat_s=1.5, busy_heartbeat_s=1.5, stacks_s=2.0)
    with capture_logs() as logs:
        async with ready_group(tmp_path, "hang at step", limits=limits) as (group, _):
            first = group.pid
            group.link.send(Step(1, 0))
            await until(lambda: group.state is State.STOPPING)
            await ready(group, n_restarts=1)
    assert any("hang_with_gil" in line for line in output_of(logs, first))


async def test_a_load_without_progress_is_ended_and_progress_moves_the_deadline(tmp_path):
    limits = brisk(load_stall_s=1.0, heartbeat_s=20.0)
    async with tiny_group(tmp_path, "sleep at load", limits=limits, TINY_ONCE=str(tmp_path / "once")) as (group, _):
        await group.start()
        await until(lambda: group.state is State.STOPPING)
        assert group.reason == "no load progress in 1 s"
        await ready(group, n_restarts=1)


async def test_a_daemon_that_never_ends_is_quarantined_and_no_second_one_is_started(tmp_path):
    """SIGKILL cannot end a process that sleeps inside a driver: here its signals are lost on the way."""
    made: list[Child] = []

    class Unkillable(Launcher):
        def launch(self, *arguments) -> Child:
            child = super().launch(*arguments)
            child.send = lambda _signal: None
            made.append(child)
            return child

    limits = brisk(reap_s=0.3)
    async with ready_group(tmp_path, "deaf", limits=limits, launcher=Unkillable) as (group, _):
        began = time.monotonic()
        assert await group.stop(0.5) is State.FAILED
        assert time.monotonic() - began < 20.0  # less than reap_s is otherwise
        assert group.quarantined
        assert "quarantine" in group.reason
        with pytest.raises(RefusedError, match="quarantine"):
            await group.restart()
        with pytest.raises(RefusedError):
            await group.start()
        assert await group.stop(0.5) is State.FAILED
        assert len(made) == 1
        os.kill(made[0].pid, signal.SIGKILL)  # the driver let go
        assert await group.wait(State.STOPPED, timeout_s=100) is State.STOPPED
        await group.start()
        assert len(made) == 2
        os.kill(made[1].pid, signal.SIGKILL)
        await group.stop()


# ---- stops, spawning and reaping


@pytest.mark.parametrize("phase", ["spawned", "asking what to load", "loading", "ready", "backoff"])
async def test_a_stop_in_each_phase_of_the_start_is_clean(tmp_path, phase):
    how = {"loading": "sleep at load", "backoff": "exit at load"}.get(phase, "")
    async with tiny_group(tmp_path, how, limits=brisk(backoff_min_s=30.0)) as (group, owner):
        if phase == "asking what to load":
            owner.may_load.clear()
        await group.start()
        pid = group.pid
        match phase:
            case "asking what to load":
                await owner.asked_for_load.wait()
            case "loading":
                await until(lambda: group.heartbeat and group.heartbeat.phase == "load")
            case "ready":
                await ready(group)
            case "backoff":
                await group.wait(State.BACKOFF, timeout_s=100)
        began = time.monotonic()
        assert await group.stop(60.0) is State.STOPPED
        assert time.monotonic() - began < 20.0  # in order, not at the deadline
        assert not exists(pid)
        assert owner.states[-1] is State.STOPPED
        await asyncio.sleep(0.1)
        assert group.state is State.STOPPED
        assert owner.n_cancelled_loads == (
            phase == "asking what to load"
        )  # nobody waits for what is not loaded any more


async def test_fifty_concurrent_stops_share_one_shutdown(tmp_path):
    async with ready_group(tmp_path) as (group, owner):
        pid = group.pid
        assert set(await asyncio.gather(*(group.stop() for _ in range(50)))) == {State.STOPPED}
        assert not exists(pid)
        assert await group.stop() is State.STOPPED
    assert owner.states.count(State.STOPPING) == 1


async def test_a_deaf_daemon_is_killed_at_the_deadline_and_a_second_stop_shortens_it(tmp_path):
    async with ready_group(tmp_path, "deaf") as (group, _):
        began = time.monotonic()
        first = asyncio.ensure_future(group.stop(1.0))
        assert await first is State.STOPPED
        assert 0.9 < time.monotonic() - began < 20.0
        await group.start()
        await ready(group)
        began = time.monotonic()
        first = asyncio.ensure_future(group.stop(60.0))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(group.stop(40.0))
        await asyncio.sleep(0.05)
        await group.stop(deadline_s=0.0)
        assert [await first, await second] == [State.STOPPED] * 2
        assert time.monotonic() - began < 20.0


async def test_an_exit_status_that_somebody_else_took_is_no_hang(tmp_path):
    async with tiny_group(tmp_path) as (group, _):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps by itself, as under some parents
        try:
            await group.start()
            await ready(group)
            os.kill(group.pid, signal.SIGKILL)
            await ready(group, n_restarts=1)
            await group.stop()
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
