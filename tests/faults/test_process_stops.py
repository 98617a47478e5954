"""Stops at any time by any number of callers, and the small print of spawning, reading and reaping."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from lucevisor.supervision.child import spawn
from lucevisor.supervision.events import ProcessSignal
from lucevisor.supervision.states import State
from tests.supervision.real_groups import (
    brisk,
    exists,
    ready,
    tiny_group,
    until,
)


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
                await group.wait(State.BACKOFF, timeout_s=60)
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
    async with tiny_group(tmp_path) as (group, owner):
        await group.start()
        await ready(group)
        pid = group.pid
        assert set(await asyncio.gather(*(group.stop() for _ in range(50)))) == {State.STOPPED}
        assert not exists(pid)
        assert await group.stop() is State.STOPPED
    assert owner.states.count(State.STOPPING) == 1


async def test_a_deaf_daemon_is_killed_at_the_deadline_and_a_second_stop_shortens_it(tmp_path):
    async with tiny_group(tmp_path, "deaf") as (group, _):
        await group.start()
        await ready(group)
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


async def test_a_signal_after_the_reap_hits_nobody(tmp_path):
    ended: asyncio.Future = asyncio.get_running_loop().create_future()
    child = spawn(["/bin/true"], {}, tmp_path, lambda *_: None, ended.set_result)
    for sock in (child.link_socket, child.pulse_socket):
        sock.close()
    outcome = await asyncio.wait_for(ended, 30)
    assert (outcome.code, outcome.signal) == (0, None)
    assert child.ended
    with pytest.raises(ProcessLookupError):
        child.send(ProcessSignal.KILL)


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
