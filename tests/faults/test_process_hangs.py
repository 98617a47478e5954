"""Daemons that hang, in every way a process can: detected, asked for their stacks, killed or set apart."""

from __future__ import annotations

import os
import signal
import time

import pytest
from structlog.testing import capture_logs

from lucevisor.protocol.steps import Step
from lucevisor.supervision.child import Child
from lucevisor.supervision.group import RefusedError
from lucevisor.supervision.launcher import LocalLauncher
from lucevisor.supervision.states import State
from tests.supervision.real_groups import (
    brisk,
    exists,
    ready,
    tiny_group,
    until,
)


def output_of(logs, pid: int) -> list[str]:
    """What a daemon wrote, from the structured log."""
    return [entry["line"] for entry in logs if entry["event"] == "output" and entry["pid"] == pid]


async def test_a_stopped_daemon_is_detected_asked_for_its_stacks_killed_and_restarted(tmp_path):
    limits = brisk(heartbeat_s=1.5, busy_heartbeat_s=1.5, stacks_s=2.0)
    with capture_logs() as logs:
        async with tiny_group(tmp_path, limits=limits) as (group, owner):
            await group.start()
            await ready(group)
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
        async with tiny_group(tmp_path, "hang at step", limits=limits) as (group, _):
            await group.start()
            await ready(group)
            first = group.pid
            group.link.send(Step(1, 0))
            await until(lambda: group.state is State.STOPPING)
            await ready(group, n_restarts=1)
    assert any("hang_with_gil" in line for line in output_of(logs, first))


async def test_an_overdue_step_restarts_the_daemon_though_its_pulse_beats(tmp_path):
    async with tiny_group(tmp_path, "sleep at step", TINY_ONCE=str(tmp_path / "once")) as (group, _):
        await group.start()
        await ready(group)
        group.link.send(Step(1, 0))
        await until(lambda: group.heartbeat and group.heartbeat.phase == "step")
        group.overdue("step 1", 31.0)
        assert group.reason == "step 1 gave no result in 31.0 s"
        await ready(group, n_restarts=1)


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

    class Unkillable(LocalLauncher):
        def launch(self, *arguments) -> Child:
            child = super().launch(*arguments)
            child.send = lambda _signal: None
            made.append(child)
            return child

    limits = brisk(reap_s=0.3)
    async with tiny_group(tmp_path, "deaf", limits=limits, launcher=Unkillable) as (group, _):
        await group.start()
        await ready(group)
        began = time.monotonic()
        assert await group.stop(0.5) is State.FAILED
        assert time.monotonic() - began < 8.0  # less than reap_s is otherwise
        assert group.quarantined
        assert "quarantine" in group.reason
        with pytest.raises(RefusedError, match="quarantine"):
            await group.restart()
        with pytest.raises(RefusedError):
            await group.start()
        assert await group.stop(0.5) is State.FAILED
        assert len(made) == 1
        os.kill(made[0].pid, signal.SIGKILL)  # the driver let go
        assert await group.wait(State.STOPPED, timeout_s=60) is State.STOPPED
        await group.start()
        assert len(made) == 2
        os.kill(made[1].pid, signal.SIGKILL)
        await group.stop()
