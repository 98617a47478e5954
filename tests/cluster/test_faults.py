"""Losses of daemons on other hosts, and of the way there, under eight streams: nobody notices more than a pause."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lucevisor.app.run import LoadProgress
from lucevisor.app.status import status
from lucevisor.deployment.service import Service
from lucevisor.supervision.events import State
from tests.cluster.hosts import Hosts, hosts, needs_namespaces
from tests.e2e.service import running
from tests.e2e.test_recovery import PLAIN, Streams
from tests.e2e.test_speculation import config_of, prompts_of
from tests.supervision.real_groups import runs
from tests.waiting import until

pytestmark = needs_namespaces


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Hosts]:
    with hosts("b", "c", folder=tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def streaming(box: Hosts, n_groups: int = 2, *, tls: bool = False) -> AsyncIterator[Service]:
    """A service over group a here, and b and maybe c on hosts; eight streams, which get the tokens of before."""
    path = config_of(PLAIN, box.folder, n_groups, "tail")
    path.write_text(box.spread(path.read_text(), tls=tls))
    async with running(path, box.folder, ["recovery.restart_limit=100/60s"]) as service:
        streams = Streams(service, prompts_of(PLAIN, 9))
        await streams.learn()
        async with streams.running():
            yield service
            answers = streams.n_answers
            await until(lambda: streams.n_answers > answers + 8)
        assert streams.wrong == []


def daemon_of(service: Service, group: str) -> int:
    hello = service.groups[group].hello
    assert hello is not None
    return hello.pid


async def replaced(service: Service, group: str, n_restarts: int = 1) -> None:
    await until(lambda: service.groups[group].restarts >= n_restarts and service.state == "ready")


async def test_a_cable_that_is_out_and_killed_processes_change_no_token_and_nothing_is_left(box: Hosts) -> None:
    async with streaming(box, 3) as service:
        assert_carries_no_secret(box, daemon_of(service, "b"))
        box.cut("b")
        await asyncio.sleep(3.0)  # of the eight seconds after which a connection counts as lost
        box.cut("b", cut=False)
        await asyncio.sleep(5.0)
        assert [group.restarts for group in service.groups.values()] == [0, 0, 0]
        for group in ("b", "c"):
            await asyncio.sleep(0.3)
            os.kill(daemon_of(service, group), signal.SIGKILL)
            await replaced(service, group)
        launcher, daemon = service.groups["b"].pid, daemon_of(service, "b")
        assert launcher is not None
        assert launcher != daemon
        os.kill(launcher, signal.SIGKILL)
        await replaced(service, "b", 2)
        await until(lambda: not runs(daemon))
        assert service.groups["a"].restarts == 0
        last = daemon_of(service, "b")
    assert not runs(last)


def assert_carries_no_secret(box: Hosts, daemon: int) -> None:
    """A daemon imports what the supervisor sent, and its secret is in no place that others can read."""
    code = Path(f"/proc/{daemon}/cwd").resolve()
    assert code.parent.name == "code"
    environment = Path(f"/proc/{daemon}/environ").read_bytes()
    assert f"PYTHONPATH={code}".encode() in environment
    assert box.secret.read_bytes() not in environment + Path(f"/proc/{daemon}/cmdline").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tls", [False, True])
async def test_faults_at_random_moments_change_no_token(box: Hosts, tls: bool) -> None:
    """Killed daemons and launchers, and cables that are out for shorter and longer than it takes to notice."""
    rng = random.Random(3 + tls)
    async with streaming(box, 3, tls=tls) as service:
        for i in range(12):
            group = service.groups["bc"[i % 2]]
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            fault, n_restarts = rng.choice(("daemon", "launcher", "cable")), group.restarts
            if fault == "cable":
                box.cut(group.name)
                await asyncio.sleep(rng.uniform(0.5, 14.0))
                box.cut(group.name, cut=False)
            else:
                pid = daemon_of(service, group.name) if fault == "daemon" else group.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await until(lambda group=group, n=n_restarts: group.restarts > n)
            await until(lambda: service.state == "ready")
        print({name: group.restarts for name, group in service.groups.items()})
        assert service.groups["a"].restarts == 0
        assert service.listener is not None
        assert service.listener.n_refused == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_cable_that_is_out_for_a_minute_is_a_lost_daemon(box: Hosts) -> None:
    """It is noticed within some seconds, said meanwhile, and over soon after the cable is in again."""
    async with streaming(box) as service:
        daemon, loop = daemon_of(service, "b"), asyncio.get_running_loop()
        box.cut("b")
        cut_at = loop.time()
        await until(lambda: service.state != "ready", 12)
        print(f"noticed after {loop.time() - cut_at:.1f} s: {service.reason()}")
        assert loop.time() - cut_at > 3
        await until(lambda: not runs(daemon), 12)  # by itself: no order can reach it
        told = []
        while loop.time() - cut_at < 60:
            shown = status(service, "box", "", LoadProgress(), [])
            [group] = [one for one in shown["groups"] if one["name"] == "b"]
            told.append(f"{group['state']}: {group['reason']}")
            assert shown["reason"].startswith("group b is ")
            assert group["host"] == "b"
            assert any(words in group["reason"] for words in ("its host answers no more", "cannot be reached"))
            await asyncio.sleep(1.0)
        print("\n".join(dict.fromkeys(told)))
        box.cut("b", cut=False)
        mended_at = loop.time()
        await until(lambda: service.state == "ready", 60)
        print(f"served again {loop.time() - mended_at:.1f} s after the cable was in")
        assert service.groups["a"].restarts == 0
        assert service.groups["b"].state is State.READY


@pytest.mark.slow
async def test_a_lost_host_is_named_through_tls_too(box: Hosts) -> None:
    async with streaming(box, tls=True) as service:
        box.cut("b")
        await until(lambda: service.state != "ready", 15)
        assert "its host answers no more: Connection timed out" in service.reason()
        box.cut("b", cut=False)
        await until(lambda: service.state == "ready", 60)
