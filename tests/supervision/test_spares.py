"""Spares: one takes over where a daemon dies, others replace what fails, and none outlives its group."""

from __future__ import annotations

import os
import signal

from lucevisor.supervision.states import State
from tests.supervision.real_groups import (
    brisk,
    environment_of,
    exists,
    open_descriptors,
    ready,
    stage_tiny,
    tiny_group,
    until,
    zombies,
)

LIMITS = brisk(spare_delay_s=0.01)
SHORT = brisk(spare_delay_s=0.01, heartbeat_s=2.0)


def warm(group) -> list[int]:
    return [spare.pid for spare in group.spares if spare.warm]


async def test_a_spare_takes_over_and_another_is_started(tmp_path):
    async with tiny_group(tmp_path, limits=LIMITS, n_spares=1) as (group, owner):
        await group.start()
        await ready(group)
        for n_restarts in (1, 2):
            await until(lambda: warm(group))
            [spare], pid = warm(group), group.pid
            os.kill(pid, signal.SIGKILL)
            await ready(group, n_restarts)
            assert group.pid == spare
            assert group.hello.pid == spare
            assert not exists(pid)
        assert owner.news == ["ready", "lost"] * 2 + ["ready"]
        assert group.spares == [] or group.spares[0].pid != spare
    assert owner.states.count(State.FAILED) == 0


async def test_a_restart_takes_one_that_was_prepared_for_it_and_keeps_none(tmp_path):
    async with tiny_group(tmp_path, limits=LIMITS) as (group, _):
        await group.start()
        assert not await group.prepare()  # nothing runs yet
        await ready(group)
        assert group.spares == []
        assert await group.prepare()
        [spare] = warm(group)
        await group.restart()
        await ready(group, 1)
        assert group.pid == spare
        assert await group.prepare()
        [other] = warm(group)
        os.kill(other, signal.SIGKILL)
        await until(lambda: not exists(other))
        assert group.spares == []


async def test_spares_that_die_are_replaced_later_and_later_and_concern_nobody(tmp_path):
    async with tiny_group(tmp_path, limits=LIMITS, n_spares=1) as (group, owner):
        await group.start()
        await ready(group)
        seen = set()
        for _ in range(3):
            await until(lambda: warm(group) and warm(group)[0] not in seen)
            [pid] = warm(group)
            seen.add(pid)
            os.kill(pid, signal.SIGKILL)
        await until(lambda: warm(group) and warm(group)[0] not in seen)
        assert group.state is State.READY
        assert owner.news == ["ready"]


async def test_a_spare_that_hangs_is_not_taken(tmp_path):
    async with tiny_group(tmp_path, limits=SHORT, n_spares=1) as (group, _):
        await group.start()
        await ready(group)
        await until(lambda: warm(group))
        [spare] = warm(group)
        os.kill(spare, signal.SIGSTOP)
        began = group._clock()
        await until(lambda: group._clock() - began > SHORT.heartbeat_s + 0.5)
        os.kill(group.pid, signal.SIGKILL)
        await ready(group, 1)
        assert group.pid != spare
        await until(lambda: not exists(spare))


async def test_no_spare_outlives_its_group(tmp_path):
    staging = stage_tiny(tmp_path)
    before, before_zombies = open_descriptors(), zombies()  # of other tests in this process
    async with tiny_group(staging, limits=LIMITS, n_spares=2) as (group, _):
        await group.start()
        await ready(group)
        await until(lambda: len(warm(group)) == 2)
        pids = [group.pid, *warm(group)]
        assert environment_of(pids[0]) == environment_of(pids[1])
        assert await group.stop() is State.STOPPED
        assert not any(exists(pid) for pid in pids)
        await group.start()  # and all over again
        await ready(group)
        await until(lambda: len(warm(group)) == 2)
    assert zombies() <= before_zombies
    assert open_descriptors() == before
