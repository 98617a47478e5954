"""One group with a real process: the way to READY and back, and what the owner hears of it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lucevisor.config import GroupConfig
from lucevisor.errors import LucevisorError
from lucevisor.model.values import Backend
from lucevisor.protocol.steps import Reset, ResetDone, Step, StepResult
from lucevisor.supervision.child import stage_packages
from lucevisor.supervision.events import State
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.launcher import Launcher
from tests.supervision.real_groups import (
    FAST,
    Owner,
    brisk,
    environment_of,
    exists,
    links_of,
    open_descriptors,
    ready,
    ready_group,
    stage_tiny,
    tiny_group,
    zombies,
)
from tests.waiting import until


async def test_start_ready_step_stop(tmp_path):
    async with ready_group(tmp_path) as (group, owner):
        pid = group.pid
        assert group.hello.pid == pid == group.hello.pid
        assert group.loads[0].shards[0].weight_bytes == 1
        group.link.send(Step(5, 0), request_id=5)
        group.link.send(Reset(6))
        await until(lambda: len(owner.frames) == 2 and group.heartbeat is not None and group.heartbeat.n_steps)
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


async def test_output_and_log_lines_become_fields(tmp_path):
    with capture_logs() as logs:
        async with ready_group(tmp_path, "raise at step") as (group, _):
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
    async with ready_group(staging) as (group, _):
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
    group = GroupSupervisor(config, 1, Launcher(stage_tiny(tmp_path)), [Owner().callbacks()], limits=FAST)
    await group.start()
    assert group.state is State.FAILED
    assert group.reason == f"groups.left: python = {python!r} {why}; give the path of the group's interpreter"


@pytest.mark.parametrize("how", ["failed load, config", "deaf, close heartbeat, failed load, config"])
async def test_a_failed_load_gives_the_daemons_words(tmp_path, how):
    """Also when the heartbeat is seen to end before the link says why."""
    async with tiny_group(tmp_path, how) as (group, owner):
        await group.start()
        await group.wait(State.FAILED, timeout_s=100)
        assert group.reason == "load failed at blk.0: tensor is missing; get the whole file"
    assert State.BACKOFF not in owner.states


async def test_a_restart_drains_and_counts(tmp_path):
    drains = []
    async with ready_group(tmp_path, draining=lambda *news: drains.append(news)) as (group, owner):
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
        core = max(os.sched_getaffinity(0))  # not every machine gives its first to all
        config = GroupConfig(name="left", backend="cpu", cores=(core,))
        group = GroupSupervisor(config, 1, Launcher(stage_tiny(tmp_path)), [Owner().callbacks()], limits=FAST)
        await group.start()
        await ready(group)
        assert os.getsid(group.pid) == group.pid != os.getsid(0)  # Ctrl-C does not reach it
        assert os.sched_getaffinity(group.pid) == {core}
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


# ---- news in an unlucky order


def watch_the_loop() -> list[dict]:
    """What reaches the loop's exception handler from now on."""
    found: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


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


async def test_a_daemon_that_says_what_cannot_be_true_is_replaced_and_its_words_are_named(tmp_path):
    fields = json.dumps({"x": math.nan})
    async with tiny_group(tmp_path, "odd log", limits=brisk(n_restarts=1), TINY_FIELDS=fields) as (group, _):
        await group.start()
        await group.wait(State.FAILED, timeout_s=100)
        assert group.reason == "it sent an impossible message: LogLine.fields.x is nan; restart limit 1/60s reached"


# ---- spares


LIMITS = brisk(spare_delay_s=0.01)
SHORT = brisk(spare_delay_s=0.01, heartbeat_s=3.0)


def warm(group) -> list[int]:
    return [spare["pid"] for spare in group.spares if spare["warm"]]


async def test_a_spare_takes_over_and_another_is_started(tmp_path):
    async with ready_group(tmp_path, limits=LIMITS, n_spares=1) as (group, owner):
        for n_restarts in (1, 2):
            await until(lambda: warm(group))
            [spare], pid = warm(group), group.pid
            os.kill(pid, signal.SIGKILL)
            await ready(group, n_restarts)
            assert group.pid == spare
            assert group.hello.pid == spare
            assert not exists(pid)
        assert owner.news == ["ready", "lost"] * 2 + ["ready"]
        assert group.spares == [] or group.spares[0]["pid"] != spare
    assert owner.states.count(State.FAILED) == 0


async def test_spares_that_die_are_replaced_later_and_later_and_concern_nobody(tmp_path):
    async with ready_group(tmp_path, limits=LIMITS, n_spares=1) as (group, owner):
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
    async with ready_group(tmp_path, limits=SHORT, n_spares=1) as (group, _):
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
    async with ready_group(staging, limits=LIMITS, n_spares=2) as (group, _):
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


# ---- the real daemon, up to its load


async def test_the_real_daemon_says_hello_and_what_it_cannot_load_is_told(tmp_path):
    pytest.importorskip("torch")
    owner = Owner()
    owner.load_error = LucevisorError("this test loads nothing")
    config = GroupConfig(name="left", backend="cpu")
    group = GroupSupervisor(
        config, 1, Launcher(stage_packages(tmp_path)), [owner.callbacks()], limits=brisk(hello_s=60.0)
    )
    await group.start()
    await group.wait(State.FAILED, timeout_s=100)
    assert group.reason == "this test loads nothing"
    assert owner.hellos[0].backend is Backend.CPU
    assert owner.hellos[0].torch
    assert owner.states == [State.STARTING, State.LOADING, State.STOPPING, State.FAILED]


@pytest.fixture
def bare_python(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return str(tmp_path / "bare" / "bin" / "python")


async def test_an_interpreter_that_lacks_packages_is_refused_with_what_to_install(tmp_path, bare_python):
    config = GroupConfig(name="left", backend="cpu", python=bare_python)
    group = GroupSupervisor(
        config, 1, Launcher(stage_packages(tmp_path)), [Owner().callbacks()], limits=brisk(hello_s=60.0)
    )
    await group.start()
    await group.wait(State.FAILED, timeout_s=100)
    assert group.reason.endswith(f"No module named 'msgspec': install torch, numpy, gguf and msgspec for {bare_python}")
    assert group.restarts == 0
