"""Daemons on two nodes of a Ray cluster: the numbers of one host, and losses that nobody notices but for a pause."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from lucevisor.deployment.service import Service
from tests.cluster.ray_hosts import RayCluster, needs_ray, ray_cluster
from tests.cluster.splits import SPLITS
from tests.combinations import slow
from tests.e2e.golden import ENGINE, FACTOR, assert_golden_numbers, model_of
from tests.e2e.process import DEMO, Cli
from tests.e2e.service import GOLDEN, running
from tests.e2e.test_recovery import PLAIN, Streams
from tests.e2e.test_speculation import config_of, prompts_of
from tests.supervision.real_groups import runs
from tests.waiting import until, wait_until

pytestmark = needs_ray

ACTOR = "ray::RemoteProcess"
RAYLET = "/raylet/raylet"


TOKEN = "f00d" * 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[RayCluster]:
    """Nodes that ask for a token, which this process and what it starts have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE", raising=False)
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        folder = tmp_path_factory.mktemp("ray")
        with ray_cluster("b", "c", folder=folder, resources={"c": ["amd=1"]}, RAY_AUTH_TOKEN=TOKEN) as made:
            yield made


def daemon_of(service: Service, group: str) -> int:
    hello = service.groups[group].hello
    assert hello is not None
    return hello.pid


@pytest.mark.parametrize(
    ("name", "groups", "cuts"),
    [
        ("llama", ["b", "c"], [2]),
        ("qwen35", ["c", "a", "b"], [2, 6]),
        *(slow(name, ["abc"[host] for host in on], cuts) for name, on, cuts in SPLITS),
    ],
    ids=str,
)
async def test_daemons_that_ray_started_give_the_golden_numbers(cluster, name, groups, cuts, tmp_path):
    ranges = [f"{start}-{stop}" for start, stop in pairwise([0, *cuts, model_of(name)[0].n_layers])]
    text = f'[model]\npath = "{GOLDEN / name / "model.gguf"}"\n'
    text += "".join(f'[groups.{group}]\nbackend = "cpu"\nthreads = 1\n' for group in groups)
    devices = [f"{group}:0" for group in groups]
    text += f"[placement]\ntarget_devices = {devices}\ntarget_layer_split = {ranges}\n{ENGINE.format(32)}"
    config = tmp_path / "box.toml"
    config.write_text(cluster.spread(text, {"b": cluster.hosts.address("b"), "c": "amd=1"}))
    async with running(config, tmp_path, FACTOR.get(name, [])) as service:
        networks = {group: os.readlink(f"/proc/{daemon_of(service, group)}/ns/net") for group in groups}
        assert len(set(networks.values())) == len(groups)
        await assert_golden_numbers(service, name)
        daemons = [daemon_of(service, group) for group in groups]
    await until(lambda: not any(map(runs, daemons)), 20.0)


@contextlib.asynccontextmanager
async def streaming(cluster: RayCluster, folder: Path) -> AsyncIterator[tuple[Service, Streams]]:
    """A service over group a here, and b and c on nodes; eight streams, which get the tokens of before."""
    path = config_of(PLAIN, folder, 3, "tail")
    path.write_text(cluster.spread(path.read_text()))
    async with running(path, folder, ["recovery.restart_limit=100/60s", "recovery.hold_s=200"]) as service:
        streams = Streams(service, prompts_of(PLAIN, 9))
        await streams.learn()
        async with streams.running():
            yield service, streams
            answers = streams.n_answers
            await until(lambda: streams.n_answers > answers + 8)
        assert streams.wrong == []


async def replaced(service: Service, group: str, former: int) -> None:
    """Wait until a group has another daemon and requests are served."""
    began = time.monotonic()
    await until(lambda: service.state != "ready" or daemon_of(service, group) != former, 30.0)
    noticed_s = time.monotonic() - began
    await until(lambda: service.state == "ready" and daemon_of(service, group) != former, 120.0)
    print(f"group {group}: noticed after {noticed_s:.1f} s, ready again after {time.monotonic() - began:.1f} s")
    await until(lambda: not runs(former), 30.0)


async def test_losses_of_daemon_actor_launcher_and_node_change_no_token(cluster, tmp_path):
    rng = random.Random(5)
    async with streaming(cluster, tmp_path) as (service, _):
        for what in ("daemon", "actor", "launcher", "raylet", "node"):
            for group in ("b", "c"):
                await asyncio.sleep(rng.uniform(0.2, 1.0))
                former = daemon_of(service, group)
                if what == "daemon":
                    os.kill(former, signal.SIGKILL)
                elif what == "launcher":
                    os.kill(service.groups[group].pid, signal.SIGKILL)
                else:
                    cluster.kill(group, {"actor": ACTOR, "raylet": RAYLET, "node": ""}[what])
                if what in ("raylet", "node"):
                    await asyncio.to_thread(cluster.restart, group)
                print(what, end=" of ")
                await replaced(service, group, former)
        assert service.groups["a"].restarts == 0


async def test_a_cut_of_the_way_there_changes_no_token(cluster, tmp_path):
    async with streaming(cluster, tmp_path) as (service, _):
        former = daemon_of(service, "b")
        cluster.hosts.cut("b")
        await asyncio.sleep(5.0)
        cluster.hosts.cut("b", cut=False)
        await asyncio.sleep(8.0)
        assert [group.restarts for group in service.groups.values()] == [0, 0, 0]  # it was short
        cluster.hosts.cut("b")
        began = time.monotonic()
        await until(lambda: service.state != "ready", 20.0)
        print(f"noticed after {time.monotonic() - began:.1f} s: {service.reason()}")
        await until(lambda: not runs(former), 20.0)
        cluster.hosts.cut("b", cut=False)
        await replaced(service, "b", former)


@pytest.mark.parametrize(
    "auth", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "beef" * 16}], ids=["none", "wrong"]
)
def test_without_the_token_nothing_is_started(cluster, auth):
    options = ["--address", cluster.address, "--host", cluster.hosts.address("b"), "--", "true"]
    command = [sys.executable, "-m", "lucevisor.cluster.ray_exec", *options]
    done = subprocess.run(command, env=cluster.env | auth, capture_output=True, text=True, check=False, timeout=100)
    print(done.stderr)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (255, "", 1)
    assert "if it has a token, this host needs ~/.ray/auth_token of its head, too" in done.stderr


# ---- the demo, as an operator runs it


@pytest.fixture
def cli():
    one = Cli()
    yield one
    one.close()


def chat(url: str, at_piece: int = -1, fault: threading.Event | None = None) -> str:
    """A streamed answer; ``fault`` is set at a piece of it."""
    messages = [{"role": "user", "content": "Write a function that merges two sorted lists."}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 120, "stream": True, "enable_thinking": False}
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    pieces: list[str] = []
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/chat/completions", data, headers), timeout=240
    ) as got:
        for line in got:
            if line.startswith(b"data: {"):
                answer = json.loads(line[6:])
                assert "error" not in answer, answer
                pieces += [choice["delta"].get("content") or "" for choice in answer["choices"]]
                if len(pieces) == at_piece and fault is not None:
                    fault.set()
    return "".join(pieces)


def test_the_demo_on_two_nodes_survives_what_kills_its_parts(cluster, cli, tmp_path):
    text = DEMO.read_text().replace('path = "demo/', f'path = "{DEMO.parent}/demo/')
    config = tmp_path / "demo.toml"
    config.write_text(cluster.spread(text, {"left": cluster.hosts.address("b"), "right": "amd=1"}))
    status = cli.start(config, "recovery.hold_s=200")
    url = status["url"]
    right = chat(url)
    assert len(right) > 100
    shown = cli.run("cluster", "status", "--address", cluster.address, "--json").stdout
    nodes = {row["address"]: row for row in json.loads(shown)}
    for host, group in (("b", "left"), ("c", "right")):
        [running_there] = nodes[cluster.hosts.address(host)]["groups"]
        assert (running_there["name"], running_there["started_by_pid"]) == (group, status["pid"])
    assert nodes[cluster.hosts.address("c")]["resources"] == {"CPU": 1.0, "amd": 1.0}
    listed = cli.run("cluster", "status", "--address", cluster.address).stdout
    assert f"{cluster.hosts.listen}  " in listed
    assert "no groups" in listed
    assert "left (pid " in listed

    def daemon_pid(group: str) -> int:
        return next(one["daemon_pid"] for one in cli.status()["groups"] if one["name"] == group)

    faults = {
        "daemon": lambda: os.kill(daemon_pid("right"), signal.SIGKILL),
        "actor": lambda: cluster.kill("b", ACTOR),
        "raylet": lambda: (cluster.kill("c", RAYLET), cluster.restart("c")),
    }

    def n_restarts() -> int:
        return sum(group["restarts"] for group in cli.status()["groups"])

    for name, inject in faults.items():
        at, before, began = threading.Event(), n_restarts(), time.monotonic()
        thread = threading.Thread(target=lambda at=at, inject=inject: (at.wait(100), inject()))
        thread.start()
        answers, longest_s = [chat(url, 5, at)], time.monotonic() - began
        while n_restarts() == before:
            assert time.monotonic() - began < 100, name
            asked = time.monotonic()
            answers.append(chat(url))
            longest_s = max(longest_s, time.monotonic() - asked)
        thread.join()
        assert set(answers) == {right}, name
        wait_until(cli.ready, 120.0)
        print(f"{name}: {len(answers)} answers, the longest took {longest_s:.1f} s")
    daemons = [daemon_pid(group) for group in ("left", "right")]
    cli.stop()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in daemons), 20.0)
    wait_until(lambda: not [p for host in "bc" for p in cluster.processes(host, ACTOR)], 20.0)
