"""One group with a real process: the way to READY and back, and what the owner hears of it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs

from lucevisor.config import GroupConfig
from lucevisor.protocol.steps import Reset, ResetDone, Step, StepResult
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.launcher import LocalLauncher
from lucevisor.supervision.states import State
from tests.supervision.real_groups import (
    FAST,
    Owner,
    environment_of,
    exists,
    links_of,
    ready,
    stage_tiny,
    tiny_group,
    until,
)


async def test_start_ready_step_stop(tmp_path):
    async with tiny_group(tmp_path) as (group, owner):
        await group.start()
        await ready(group)
        pid = group.pid
        assert group.hello.pid == pid == group.hello.pid
        assert group.loaded.shards[0].weight_bytes == 1
        group.link.send(Step(5, 0), request_id=5)
        group.link.send(Reset(6))
        await until(lambda: len(owner.frames) == 2 and owner.heartbeats[-1].n_steps)
        assert [frame.message for frame in owner.frames] == [StepResult(5, 0), ResetDone(6)]
        assert group.heartbeat.n_tokens == 1
        assert group.heartbeat.rss_bytes > 2**20
        assert [progress.done_bytes for progress in owner.progress] == [0, 1, 2]
        assert await group.stop() is State.STOPPED
        assert not exists(pid)
        assert group.pid is None
        assert group.link is None
    assert owner.news == ["ready", "lost"]
    assert owner.states == [State.STARTING, State.LOADING, State.READY, State.STOPPING, State.STOPPED]


def test_a_killed_daemon_is_replaced_on_uvloop(tmp_path):
    async def story():
        async with tiny_group(tmp_path) as (group, owner):
            await group.start()
            await ready(group)
            os.kill(group.pid, signal.SIGKILL)
            await group.wait(State.BACKOFF, timeout_s=100)
            assert "signal 9 (SIGKILL)" in group.reason
            await ready(group)
            assert await group.stop() is State.STOPPED
        assert owner.news == ["ready", "lost", "ready", "lost"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


async def test_output_and_log_lines_become_fields(tmp_path):
    with capture_logs() as logs:
        async with tiny_group(tmp_path, "raise at step") as (group, _):
            await group.start()
            await ready(group)
            pid = group.pid
            group.link.send(Step(5, 0))
            await group.wait(State.BACKOFF, timeout_s=100)
            assert group.reason.startswith(
                "step failed at left: RuntimeError: tiny raises at step (at daemons/worker.py:"
            )
    lines = [entry for entry in logs if entry["event"] == "output"]
    assert {"group": "left", "pid": pid, "stream": "stderr", "log_level": "info", "event": "output"}.items() <= lines[
        0
    ].items()
    assert any("RuntimeError: tiny raises at step" in entry["line"] for entry in lines)
    said = next(entry for entry in logs if entry["event"] == "tiny is ready")
    assert (said["group"], said["daemon_group"], said["pid"]) == ("left", "mine", pid)
    assert any("Traceback" in entry.get("details", "") for entry in logs)


async def test_other_code_is_refused_with_the_line_that_fixes_it(tmp_path):
    async with tiny_group(tmp_path, "other code") as (group, owner):
        await group.start()
        await group.wait(State.FAILED, timeout_s=100)
        assert "other code (hash 0123456789abcdef)" in group.reason
        assert "restart the supervisor" in group.reason
    assert owner.states.count(State.STARTING) == 1  # a configuration error is not retried


async def test_code_that_changes_between_two_starts_is_refused(tmp_path):
    staging = stage_tiny(tmp_path)
    async with tiny_group(staging) as (group, _):
        await group.start()
        await ready(group)
        (staging.directory / "daemons" / "new.py").write_text("# an upgrade under a running supervisor\n")
        await group.restart(now=True)
        await group.wait(State.FAILED, timeout_s=100)
        assert "other code" in group.reason


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("no-such-python", "is not on PATH"),
        ("/nowhere/python", "is not an executable file"),
        (str(Path(__file__)), "is not an executable file"),
    ],
)
async def test_a_wrong_interpreter_is_a_configuration_error(tmp_path, python, why):
    config = GroupConfig(name="left", backend="cpu", python=python)
    group = GroupSupervisor(config, 1, LocalLauncher(stage_tiny(tmp_path)), Owner().callbacks(), limits=FAST)
    await group.start()
    assert group.state is State.FAILED
    assert group.reason == f"groups.left: python = {python!r} {why}; give the path of the group's interpreter"


@pytest.mark.parametrize("how", ["failed load, config", "deaf, close pulse, failed load, config"])
async def test_a_failed_load_gives_the_daemons_words(tmp_path, how):
    """Also when the pulse is seen to end before the link says why."""
    async with tiny_group(tmp_path, how) as (group, owner):
        await group.start()
        await group.wait(State.FAILED, timeout_s=100)
        assert group.reason == "load failed at blk.0: tensor is missing; get the whole file"
    assert State.BACKOFF not in owner.states


async def test_a_restart_drains_and_counts(tmp_path):
    drains = []
    async with tiny_group(tmp_path, draining=lambda *news: drains.append(news)) as (group, owner):
        await group.start()
        await ready(group)
        first = group.pid
        await group.restart()
        assert group.state is State.DRAINING
        group.link.send(Reset(9))  # work under way is finished
        await until(lambda: owner.frames)
        group.drained(drains[0][1])
        await ready(group)
        assert group.pid != first
        assert group.restarts == 1
    assert drains == [("left", 1)]
    assert owner.states[3:7] == [State.DRAINING, State.STOPPING, State.STARTING, State.LOADING]


async def test_the_daemon_has_its_own_session_its_cores_and_no_foreign_descriptor(tmp_path):
    leaked = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        config = GroupConfig(name="left", backend="cpu", cores=(0,))
        group = GroupSupervisor(config, 1, LocalLauncher(stage_tiny(tmp_path)), Owner().callbacks(), limits=FAST)
        await group.start()
        await ready(group)
        assert os.getsid(group.pid) == group.pid != os.getsid(0)  # Ctrl-C does not reach it
        assert os.sched_getaffinity(group.pid) == {0}
        open_there = links_of(group.pid)
        assert sum(name.startswith("socket:") for name in open_there) == 2
        assert sum(name.startswith("pipe:") for name in open_there) == 2
        assert [name for name in open_there if not name.startswith(("socket:", "pipe:"))] == ["/dev/null"]  # its stdin
        assert b"OMP_NUM_THREADS=1" in environment_of(group.pid)
        os.kill(group.pid, signal.SIGINT)
        await asyncio.sleep(0.2)
        assert group.state is State.READY
        await group.stop()
    finally:
        os.close(leaked)


async def test_a_daemon_told_to_terminate_by_an_operator_ends_in_order_and_is_restarted(tmp_path):
    async with tiny_group(tmp_path) as (group, _):
        await group.start()
        await ready(group)
        await asyncio.sleep(0.1)  # the tiny daemon reports idle a moment after it sent Loaded
        os.kill(group.pid, signal.SIGTERM)
        await group.wait(State.BACKOFF, timeout_s=100)
        assert "exited with code 0" in group.reason
        await ready(group)
