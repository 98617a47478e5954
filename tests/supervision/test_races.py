"""News that come in an unlucky order, with real processes: death beside hello, ready, signals and stops."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal

from structlog.testing import capture_logs

from lucevisor.protocol.steps import Step
from lucevisor.supervision.states import State
from tests.supervision.real_groups import Owner, brisk, exists, ready, tiny_group


def watch_the_loop() -> list[dict]:
    """What reaches the loop's exception handler from now on."""
    found: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


async def test_the_last_log_record_of_a_dying_daemon_is_logged(tmp_path):
    with capture_logs() as logs:
        async with tiny_group(tmp_path, "last words at step", TINY_ONCE=str(tmp_path / "once")) as (group, _):
            await group.start()
            await ready(group)
            group.link.send(Step(1, 0))
            await ready(group, n_restarts=1)
    words = [entry["n"] for entry in logs if entry["event"] == "last words"]
    assert words == list(range(200))


async def test_callbacks_that_raise_lose_no_news_and_no_child(tmp_path):
    class Faulty(Owner):
        def on_ready(self, *news):
            super().on_ready(*news)
            raise OSError("disk full")

        def on_lost(self, *news):
            super().on_lost(*news)
            raise OSError("disk full")

        def on_state(self, *news):
            super().on_state(*news)
            raise OSError("disk full")

    async with tiny_group(tmp_path, owner=Faulty()) as (group, owner):
        unhandled = watch_the_loop()
        await group.start()
        await group.wait(State.READY, timeout_s=100)
        pid = group.pid
        os.kill(pid, signal.SIGKILL)
        await group.wait(State.BACKOFF, timeout_s=100)
        await group.wait(State.READY, timeout_s=100)
        assert await group.stop() is State.STOPPED
        assert not exists(pid)
    assert owner.news == ["ready", "lost", "ready", "lost"]
    assert len(unhandled) == len(owner.states) + len(owner.news)
    assert {type(context["exception"]) for context in unhandled} == {OSError}


async def test_the_end_of_an_earlier_drain_does_not_end_a_later_one(tmp_path):
    """The daemon dies while it drains; the owner's wait for that drain ends during the drain of the next process."""
    drains = []
    async with tiny_group(tmp_path, draining=lambda _, child: drains.append(child)) as (group, _):
        await group.start()
        await ready(group)
        await group.restart(deadline_s=60.0)
        first = drains[0]
        os.kill(group.pid, signal.SIGKILL)
        await ready(group, n_restarts=1)
        await group.restart(deadline_s=60.0)
        assert group.state is State.DRAINING
        group.drained(first)
        assert group.state is State.DRAINING
        group.drained(drains[1])
        await ready(group, n_restarts=2)


async def test_a_stop_in_backoff_and_a_restart_of_what_is_stopped(tmp_path):
    async with tiny_group(tmp_path, "exit at load", limits=brisk(backoff_min_s=30.0)) as (group, owner):
        await group.start()
        await group.wait(State.BACKOFF, timeout_s=100)
        assert await group.stop() is State.STOPPED
        await group.restart()
        await group.wait(State.BACKOFF, timeout_s=100)
        await group.restart()  # does not wait for the pause
        await group.wait(State.BACKOFF, timeout_s=100)
    assert owner.states.count(State.STARTING) == 3


async def test_a_daemon_that_says_what_cannot_be_true_is_replaced_and_its_words_are_named(tmp_path):
    fields = json.dumps({"x": math.nan})
    async with tiny_group(tmp_path, "odd log", limits=brisk(n_restarts=1), TINY_FIELDS=fields) as (group, _):
        await group.start()
        await group.wait(State.FAILED, timeout_s=60)
        assert group.reason == "it sent an impossible message: LogLine.fields.x is nan; restart limit 1/60s reached"
