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


async def test_a_spare_in_its_rehearsal_is_not_warm_and_still_better_than_none(tmp_path):
    async with tiny_group(tmp_path, "pause at rehearsal", limits=LIMITS, n_spares=1) as (group, owner):
        await group.start()
        await ready(group)
        await until(lambda: group._spares._spares and all(s.greeted for s in group._spares._spares.values()))
        assert warm(group) == []
        [spare] = [one.pid for one in group.spares]
        os.kill(group.pid, signal.SIGKILL)
        await ready(group, 1)
        assert group.pid == spare
        assert owner.news == ["ready", "lost", "ready"]


async def test_a_spare_that_hangs_in_its_rehearsal_is_replaced(tmp_path):
    limits = brisk(spare_delay_s=0.01, hello_s=3.0)
    async with tiny_group(tmp_path, "hang at rehearsal", limits=limits, n_spares=1) as (group, owner):
        await group.start()
        await ready(group)
        await until(lambda: group.spares)
        [spare] = [one.pid for one in group.spares]
        await until(lambda: group.spares and group.spares[0].pid != spare)
        assert not exists(spare)
        assert warm(group) == []
        assert (group.state, owner.news) == (State.READY, ["ready"])


async def test_a_rehearsal_may_take_longer_than_a_hello_but_not_forever(tmp_path):
    """As long as heartbeats come."""
    limits = brisk(spare_delay_s=0.01, hello_s=3.0, rehearsal_s=5.0)
    async with tiny_group(tmp_path, "sleep at rehearsal", limits=limits, n_spares=1) as (group, owner):
        await group.start()
        await ready(group)
        await until(lambda: any(spare.rehearses for spare in group._spares._spares.values()))
        began, [spare] = group._clock(), [one.pid for one in group.spares]
        await until(lambda: [one.pid for one in group.spares] != [spare])
        assert group._clock() - began > 4.5
        assert owner.news == ["ready"]


async def test_a_spare_rehearses_what_the_present_daemon_was_sent(tmp_path):
    async with tiny_group(tmp_path, limits=LIMITS, n_spares=1) as (group, _):
        await group.start()
        await ready(group)
        await until(lambda: warm(group))
        seen, spares = [], group._spares
        load = spares._present_load
        spares._present_load = lambda: seen.append(load()) or seen[-1]
        os.kill(group.pid, signal.SIGKILL)
        await ready(group, 1)
        await until(lambda: warm(group))
        assert seen == [group._daemon.ordered]
        assert seen[0] is not None


async def test_a_spare_that_says_hello_while_its_group_loads_rehearses_when_that_is_ready(tmp_path):
    async with tiny_group(tmp_path, limits=LIMITS, n_spares=1) as (group, _):
        await group.start()
        assert group._ordered() is None
        await ready(group)
        load, spares = group._ordered(), group._spares
        assert load is not None
        spares._present_load = lambda: None  # as if it loaded again
        await until(lambda: spares._spares and all(spare.greeted for spare in spares._spares.values()))
        assert warm(group) == []
        spares._present_load = lambda: load
        spares.keep()
        await until(lambda: warm(group))


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
    before = open_descriptors()
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
    assert zombies() == 0
    assert open_descriptors() == before
