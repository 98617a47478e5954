"""One daemon process with a link for each model."""

from __future__ import annotations

import os
import signal

import pytest

from lucevisor.config import GroupConfig
from lucevisor.protocol.steps import Reset, Step
from lucevisor.supervision.events import State
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.launcher import Launcher
from tests.supervision.real_groups import FAST, Owner, ready, stage_tiny, until

pytestmark = pytest.mark.filterwarnings("error")


async def test_each_model_has_its_own_link_and_all_share_the_life_of_the_process(tmp_path):
    owners = [Owner(), Owner()]
    drained: list[int] = []
    callbacks = [one.callbacks(lambda _, child, i=i: drained.append((i, child))) for i, one in enumerate(owners)]
    config = GroupConfig(name="left", backend="cpu")
    group = GroupSupervisor(config, 1, Launcher(stage_tiny(tmp_path)), callbacks, limits=FAST)
    owners[1].may_load.clear()
    await group.start()
    try:
        await owners[1].asked_for_load.wait()
        assert group.state is State.LOADING, "one model of two has its load"
        assert owners[0].news == []
        owners[1].may_load.set()
        await ready(group)
        assert [one.news for one in owners] == [["ready"], ["ready"]]
        assert owners[0].hellos[0].pid == owners[1].hellos[0].pid == group.pid
        assert len(group.loads) == 2
        owners[1].links[0].send(Step(5, 0), request_id=5)
        await until(lambda: owners[1].frames)
        owners[0].links[0].send(Reset(6))
        await until(lambda: owners[0].frames)
        assert [type(frame.message).__name__ for frame in owners[1].frames] == ["StepResult"]
        assert [type(frame.message).__name__ for frame in owners[0].frames] == ["ResetDone"]

        os.kill(group.pid, signal.SIGKILL)
        await ready(group, n_restarts=1)
        assert [one.news for one in owners] == [["ready", "lost", "ready"]] * 2

        await group.restart(deadline_s=30.0)
        await until(lambda: len(drained) == 2)
        assert group.state is State.DRAINING
        group.drained(drained[0][1])
        assert group.state is State.DRAINING, "the other model has work there"
        group.drained(drained[1][1])
        await ready(group, n_restarts=2)
    finally:
        assert await group.stop(5.0) is State.STOPPED
