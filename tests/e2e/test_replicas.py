"""Two replicas of the demo model, each of two cpu groups, behind one endpoint.

Oracle: the same requests, one at a time, in float32.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.service import ModelService, Service
from lucevisor.protocol.steps import Dry, Mirostat, SamplingParams
from lucevisor.supervision.machine import SupervisionLimits
from tests.e2e.process import Cli, post
from tests.e2e.service import DEMO, generate_all, running
from tests.waiting import until, wait_until

pytestmark = pytest.mark.timeout(300)

N_TOKENS = 24
N_KILLS = 5
N_ASKED = 16
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95, seed=11, presence_penalty=0.5),
    SamplingParams(temperature=0.0, dry=Dry(1.0, breakers=((10,),))),
    SamplingParams(temperature=0.9, seed=12, mirostat=Mirostat(2, 3.0, 0.2), frequency_penalty=0.2),
)
GROUPS = ("a0", "a1", "b0", "b1")
CONFIG = f"""
[model]
path = "{DEMO}"
[engine]
dtype = "float32"
max_sequences = 8
pages = 400
[cache]
min_tokens = 32
[placement]
target_devices = ["a0:0", "a1:0", "b0:0", "b1:0"]
target_layer_split = ["0-4", "4-8"]
[replicas.a]
groups = ["a0", "a1"]
[replicas.b]
groups = ["b0", "b1"]
[recovery]
restart_limit = "9999/60s"
""" + "".join(f'[groups.{name}]\nbackend = "cpu"\nthreads = 1\n' for name in GROUPS)
ALONE = CONFIG.replace(', "b0:0", "b1:0"', "")
ALONE = ALONE[: ALONE.index("[replicas.b]")] + ALONE[ALONE.index("[recovery]") : ALONE.index("[groups.b0]")]
BRISK = SupervisionLimits(backoff_min_s=0.02, backoff_max_s=0.02, spare_delay_s=0.02)


def prompts(n: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 4000) for _ in range(rng.randrange(40, 140))] for _ in range(n)]


@contextlib.asynccontextmanager
async def replicated(directory: Path, text: str = CONFIG, *overrides: str) -> AsyncIterator[Service]:
    file = directory / "box.toml"
    file.write_text(text)
    async with running(file, directory, overrides, limits=BRISK) as service:
        await until(lambda: all(model.state == "ready" for model in service.models.values()))
        yield service


async def ask(service: Service, prompt: list[int], sampling: SamplingParams, n: int = N_TOKENS, turns=()) -> Any:
    tokens, finished = await generate_all(SimpleNamespace(engine=service.replicated), prompt, n, sampling, turns)  # type: ignore[arg-type]
    assert finished.error is None, finished.error
    return tokens, finished.usage.cached_tokens


@pytest.fixture(scope="module")
def asked() -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, SAMPLINGS[i % 4]) for i, prompt in enumerate(prompts(N_ASKED))]


@pytest.fixture(scope="module")
def expected(asked, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    async def one_at_a_time() -> list[list[int]]:
        async with replicated(tmp_path_factory.mktemp("alone"), ALONE) as service:
            return [(await ask(service, prompt, how))[0] for prompt, how in asked]

    return asyncio.run(one_at_a_time())


def replica_of(service: Service, name: str) -> ModelService:
    return next(model for model in service.models.values() if model.replica == name)


async def all_at_once(service: Service, asked: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    return [tokens for tokens, _ in await asyncio.gather(*(ask(service, prompt, how) for prompt, how in asked))]


async def test_streams_get_their_tokens_also_when_every_daemon_of_a_replica_is_killed(tmp_path, asked, expected):
    async with replicated(tmp_path) as service:
        assert [[*model.groups] for model in service.models.values()] == [["a0", "a1"], ["b0", "b1"]]
        assert await all_at_once(service, asked) == expected
        assert service.replicated is not None
        router = service.replicated.router
        assert sum(router.n_routed.values()) == N_ASKED
        assert min(router.n_routed.values()) >= 6
        for name in ("a", "b"):
            streams = asyncio.create_task(all_at_once(service, asked[:8]))
            engine = service.replicated.replicas[name]
            n_before = engine.statistics().generated_tokens
            await until(lambda: engine.statistics().generated_tokens > n_before + 20)  # noqa: B023
            assert engine.statistics().running
            for group in replica_of(service, name).groups.values():
                assert group.pid is not None
                os.kill(group.pid, signal.SIGKILL)
            assert await streams == expected[:8]
            await until(lambda: all(model.state == "ready" for model in service.models.values()))
        assert all(n > 0 for n in router.n_moved.values())


@pytest.mark.slow
async def test_daemons_killed_at_random_change_no_token(tmp_path, asked, expected):
    """Half a replica, which is rebuilt, or all of it, while the other one is whole or not.

    A request ends at its fourth loss in a row without a token, so the next kills wait until none is left of those that
    met the last ones: three daemons at once are three losses for a request that moves from one to the next.
    """
    rng = random.Random(4)
    async with replicated(tmp_path) as service:
        ended, n_answers = False, [0] * 8

        async def stream(at: int) -> None:
            number = at
            while not ended:
                prompt, how = asked[number]
                assert (await ask(service, prompt, how))[0] == expected[number]
                n_answers[at], number = n_answers[at] + 1, (number + 9) % N_ASKED

        async with asyncio.TaskGroup() as streams:
            for at in range(len(n_answers)):
                streams.create_task(stream(at))
            for _ in range(N_KILLS):
                await asyncio.sleep(rng.random())
                for group in rng.sample([*service.groups.values()], rng.choice((1, 1, 2, 3))):
                    if group.pid is not None:
                        os.kill(group.pid, signal.SIGKILL)
                n_before = [*n_answers]
                await until(lambda: all(now > before for now, before in zip(n_answers, n_before, strict=True)))  # noqa: B023
            ended = True


async def converse(service: Service, n_conversations: int, n_turns: int) -> int:
    """Conversations on one system prompt, at the same time; return the tokens of their prompts that were cached."""
    system = prompts(1, seed=7)[0][:100]

    async def conversation(number: int) -> int:
        rng, prompt, turns, n_cached = random.Random(number), list(system), [len(system)], 0
        for _ in range(n_turns):
            prompt += [rng.randrange(5, 4000) for _ in range(rng.randrange(20, 60))]
            turns.append(len(prompt))
            prompt += [1, 2]
            answer, cached = await ask(service, prompt, SAMPLINGS[0], 24, turns)
            n_cached += cached
            prompt += answer
            turns.append(len(prompt))
        return n_cached

    first = await conversation(1000)  # computes the system prompt
    return first + sum(await asyncio.gather(*(conversation(number) for number in range(n_conversations))))


@pytest.mark.slow
async def test_conversations_stay_on_their_prefix(tmp_path):
    cached = []
    for text in (ALONE, CONFIG):
        async with replicated(tmp_path, text) as service:
            cached.append(await converse(service, 8, 6))
            statistics = [engine.statistics() for engine in service.replicated.replicas.values()]  # type: ignore[union-attr]
            assert all(now.cache.n_prompts for now in statistics)
    alone, both = cached
    assert both >= 0.95 * alone, cached


async def test_a_rolling_restart_under_traffic_fails_no_request(tmp_path, asked, expected):
    """Nor does one before it that is interrupted, in its drain and while it waits for another."""
    async with replicated(tmp_path) as service:
        assert service.replicated is not None
        router, admin = service.replicated.router, AdminOperations(service)
        pids = {name: group.pid for name, group in service.groups.items()}
        answers = [asyncio.create_task(ask(service, prompt, how, 200)) for prompt, how in asked[:4]]
        await until(lambda: min(router.n_routed.values()) >= 2)
        restarts = [asyncio.create_task(admin.restart_all([name], now=False)) for name in ("a0", "b0")]
        await until(lambda: bool(router.draining))
        await asyncio.sleep(0.1)
        assert router.draining == {"a"}  # one after the other
        for restart in reversed(restarts):
            restart.cancel()
        await asyncio.wait(restarts)
        assert not router.draining
        await asyncio.gather(*answers)
        assert {name: group.pid for name, group in service.groups.items()} == pids
        assert all(model.state == "ready" for model in service.models.values())

        ended, n_answers = False, 0

        async def stream(number: int) -> None:
            nonlocal n_answers
            while not ended:
                prompt, how = asked[number]
                assert (await ask(service, prompt, how))[0] == expected[number]
                n_answers += 1

        async with asyncio.TaskGroup() as streams:
            for number in range(6):
                streams.create_task(stream(number))
            await until(lambda: n_answers > 6)
            await admin.restart_all([*service.groups], now=False)
            n_after = n_answers
            await until(lambda: n_answers > n_after + 6)
            ended = True
        assert all(group.pid != pids[name] for name, group in service.groups.items())
        assert [group.restarts for group in service.groups.values()] == [1, 1, 1, 1]
        assert not router.draining
        pauses = [engine.statistics().recovery.n_recomputed for engine in service.replicated.replicas.values()]
        assert pauses == [0, 0]  # nothing ran on a replica while its daemons were away


async def test_snapshots_of_one_replica_are_restored_by_the_other(tmp_path, asked):
    prompt = asked[0][0]
    async with replicated(tmp_path, CONFIG, f"cache.dir={tmp_path / 'slots'}", "cache.min_tokens=32") as service:
        a, b = service.models.values()
        assert a.snapshot_store is b.snapshot_store
        first, _ = await ask(service, prompt, SAMPLINGS[0])
        # the answer's end is in a file, not only what its prompt has of whole pages
        await until(lambda: a.snapshot_store and any(e.n_tokens >= len(prompt) for e in a.snapshot_store.entries))
        [busy] = [model for model in (a, b) if model.engine is not None and model.engine.statistics().cache.n_slots]
        other = b if busy is a else a
        for group in busy.groups.values():
            os.kill(group.pid, signal.SIGSTOP)  # it does not come back at once
            os.kill(group.pid, signal.SIGKILL)
        await until(lambda: busy.state != "ready")
        _, n_cached = await ask(service, [*prompt, *first, 7, 8, 9], SAMPLINGS[0])
        assert n_cached >= len(prompt)
        assert other.engine is not None
        assert other.engine.statistics().cache.tokens["disk"] == n_cached


def test_two_replicas_are_operated_like_one_model(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "box.toml"
    cache = f'[cache]\ndir = "{tmp_path / "slots"}"\ndisk = "100MiB"\n'  # where less is free, that is the limit
    file.write_text(CONFIG.replace("[cache]\n", cache))
    status = cli.start(file)
    url = status["url"]
    wait_until(lambda: all(model["state"] == "ready" for model in cli.status()["models"]), what="both serve")

    def answer() -> str:
        body = {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "max_tokens": 8}
        code, found = post(f"{url}/v1/chat/completions", body | {"temperature": 0})
        assert code == 200
        return found["choices"][0]["message"]["content"]

    first = answer()
    assert [model["replica"] for model in cli.status()["models"]] == ["a", "b"]
    shown = cli.run("status").stdout
    assert "replica a ready" in shown
    assert "replica b ready" in shown
    assert "replica" in cli.run("top").stdout
    with urllib.request.urlopen(f"{url}/v1/models", timeout=100) as reply:
        assert json.load(reply)["data"][0]["replicas"] == {"a": {"ready": True}, "b": {"ready": True}}
    with urllib.request.urlopen(f"{url}/metrics", timeout=100) as reply:
        lines = reply.read().decode().splitlines()
    for name in ("a", "b"):
        assert sum(f'replica="{name}"' in line and line.startswith("lucevisor_steps_total{") for line in lines) == 1
        assert sum(f'lucevisor_replica_serving{{model="{status["models"][0]["name"]}",replica="{name}"}} 1.0' == line
                   for line in lines) == 1  # fmt: skip
    cli.run("restart", "--rolling")
    assert answer() == first
    lists = (["cache", "ls"], ["cache", "ls", "--config", str(file)])  # the last answer may still be on its way there
    wait_until(lambda: len({cli.run(*one).stdout for one in lists}) == 1, what="both list the same files")
    refused = cli.run("reload", "--set", "replicas.a.groups=a0", check=False)
    assert refused.returncode == 2
    cli.stop()
