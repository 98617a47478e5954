"""Prefix slots that devices evict, in host memory: the same greedy tokens from every tier, most of the
reuse of a pool that holds all, and nothing lost with a daemon.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from lucevisor.deployment.service import Service
from lucevisor.model.families import open_spec
from lucevisor.placement.result import HostOwner
from tests.combinations import slow
from tests.e2e.service import DEMO, MODELS, TRANSPORTS, Told, ask, restore_always, running, write_config
from tests.model.drafter_files import UPSTREAM
from tests.waiting import until

CONFIG = """
[engine]
dtype = "float32"
prefill_chunk = 64
max_sequences = 4
pages = 2000
[cache]
min_tokens = 16
prefix_slots = {slots}
memory = "1GiB"
host = "{host}"
[draft]
{draft}
"""
N_CONVERSATIONS, N_TURNS = 9, 3
N_SLOTS = 9  # of three conversations


async def in_turn(service: Service, vocabulary: int, n: int = N_CONVERSATIONS) -> Told:
    """Conversations behind one system prompt, each of which is asked again when all others were."""
    told, rng = Told(), random.Random(7)
    system = [rng.randrange(vocabulary) for _ in range(100)]
    prompts, turns = [list(system) for _ in range(n)], [[len(system)] for _ in range(n)]
    for _ in range(N_TURNS):
        for i in range(n):
            prompts[i] += [rng.randrange(vocabulary) for _ in range(rng.randrange(70, 110))]
            turns[i].append(len(prompts[i]))
            prompts[i] += [1, 2]  # what opens an answer
            answer, finished = await ask(service, prompts[i], turns[i])
            told.answers.append(answer)
            told.prompts.append(len(prompts[i]))
            told.cached.append(finished.usage.cached_tokens)
            prompts[i] += answer
            turns[i].append(len(prompts[i]))
            if service.only.snapshots is not None:
                await service.only.snapshots.copy_all()  # a slot that is evicted before its copy has ended is lost
    return told


def tokens_by_tier(service: Service) -> dict[str, int]:
    assert service.only.engine is not None
    return service.only.engine.statistics().cache.tokens


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("qwen35", UPSTREAM),
        slow("qwen3", None),
        slow("gemma4_e2b", None),
        slow("qwen35moe", None),
        slow("qwen3next", None),
        slow("demo", DEMO.with_name("demo-qwen35-22m-dflash2-q4_0.gguf")),
    ],
)
async def test_every_tier_gives_the_same_tokens_and_host_memory_nearly_all_of_the_reuse(
    name: str, drafter: Path | None, tmp_path: Path
) -> None:
    spec = open_spec(MODELS[name])
    ranges = [f"0-{spec.n_layers // 2}", f"{spec.n_layers // 2}-{spec.n_layers}"]
    draft = 'kind = "off"' if drafter is None else f'path = "{drafter}"'

    def config(slots: int, host: str = "0", transport: str = "shared_memory") -> Path:
        extra = CONFIG.format(slots=slots, host=host, draft=draft)
        return write_config(tmp_path, MODELS[name], {"a": 1, "b": 1}, ranges, extra, transport)

    async with running(config(2000), tmp_path) as service:
        device = await in_turn(service, spec.vocabulary)
    async with running(config(N_SLOTS), tmp_path) as service:
        evicted = await in_turn(service, spec.vocabulary)
    assert device.answers == evicted.answers
    for transport in TRANSPORTS:
        async with running(config(N_SLOTS, "64MiB", transport), tmp_path) as service:
            restore_always(service)
            host = await in_turn(service, spec.vocabulary)
            found = tokens_by_tier(service)
            assert found["host"] > found["device"] > 0
            assert found["device"] + found["host"] == sum(host.cached)
            assert 0 < service.only.host_memory.used(HostOwner.PREFIXES) <= 64 << 20
        assert host.answers == device.answers
        assert sum(host.cached) >= 0.9 * sum(device.cached) > 1.4 * sum(evicted.cached)


async def test_what_is_in_host_memory_outlives_a_daemon_and_stays_within_its_limit(tmp_path: Path) -> None:
    spec = open_spec(MODELS["qwen35"])
    extra = CONFIG.format(slots=300, host="1MiB", draft='kind = "off"') + "[recovery]\nspares = 1\n"
    config = write_config(tmp_path, MODELS["qwen35"], {"a": 1, "b": 1}, ["0-2", f"2-{spec.n_layers}"], extra)
    async with running(config, tmp_path) as service:
        assert service.only.engine is not None
        restore_always(service)
        prompt = [k % 250 for k in range(300)]
        right, _ = await ask(service, prompt, [290])
        await until(lambda: service.only.host_tier and any(s.n_tokens >= 256 for s in service.only.host_tier.slots))
        os.kill(service.groups["b"].pid or 0, signal.SIGKILL)
        await until(lambda: not service.only.engine.prefixes.slots)  # type: ignore[union-attr]
        answer, finished = await ask(service, prompt, [290])
        assert answer == right
        assert finished.usage.cached_tokens >= 256
        assert tokens_by_tier(service)["host"] == finished.usage.cached_tokens
        asked = [[i, *prompt] for i in range(30)]
        for other in asked:
            await ask(service, other, [290])
            assert service.only.host_memory.used(HostOwner.PREFIXES) <= 1 << 20
        await asyncio.gather(*(ask(service, other, [290]) for other in asked))
        assert service.only.host_memory.used(HostOwner.PREFIXES) <= 1 << 20
