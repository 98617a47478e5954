"""Conversations that idle while their daemon is killed go on with what was cached of them, and the same tokens."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from lucevisor.deployment.service import Service
from lucevisor.engine.statistics import EngineStatistics
from tests.e2e.service import generate, generate_all
from tests.e2e.test_recovery import CONFIGURATIONS, SAMPLINGS, fault, serving
from tests.e2e.test_speculation import Case

N_TOKENS = 16
N_CONVERSATIONS = 3


def statistics_of(service: Service) -> EngineStatistics:
    assert service.engine is not None
    return service.engine.statistics()


async def next_turn(service: Service, index: int, text: list[int]) -> tuple[list[int], int]:
    """The answer to a conversation so far, and how many tokens of it were cached."""
    tokens, finished = await generate_all(service, text, N_TOKENS, SAMPLINGS[index % 2], turns=[len(text) // 2])
    assert finished.reason == "length", finished
    return tokens, finished.usage.cached_tokens


ROUNDS = [
    *(pytest.param(*one.values, 1, id=f"{one.id}, once") for one in CONFIGURATIONS[1:]),
    *(
        pytest.param(*one.values, 15, id=f"{one.id}, many", marks=[pytest.mark.slow, pytest.mark.timeout(600)])
        for one in CONFIGURATIONS
    ),
]


@pytest.mark.parametrize(("case", "n_groups", "place", "n_rounds"), ROUNDS)
async def test_conversations_that_rest_at_a_kill_go_on(
    tmp_path: Path, case: Case, n_groups: int, place: str, n_rounds: int
) -> None:
    """Beside a stream; then all at once, and a group is killed while slots are refilled."""
    rng = random.Random(n_groups)
    async with serving(case, tmp_path, n_groups, place) as service:
        texts, right = [], []
        for index in range(N_CONVERSATIONS):
            text = [rng.randrange(256) for _ in range(150 + 40 * index)]
            text += [*(await next_turn(service, index, text))[0], *(rng.randrange(256) for _ in range(9))]
            texts.append(text)
            right.append((await next_turn(service, index, text))[0])
        other = [rng.randrange(256) for _ in range(40)]
        expected = await generate(service, other, 90)
        layers = [name for name in service.groups if name != "d"]
        hit = layers * n_rounds if n_rounds > 1 else layers[-1:]
        for group in hit:
            stream = asyncio.create_task(generate(service, other, 90))
            await asyncio.sleep(0.02)
            await fault(service, group, signal.SIGKILL)
            before = statistics_of(service).recovery
            for index, text in enumerate(texts):
                tokens, n_cached = await next_turn(service, index, text)
                assert (tokens, n_cached >= len(text) - 10) == (right[index], True), (group, index, n_cached)
            assert await stream == expected
            now = statistics_of(service).recovery
            assert now.n_rebuilt >= before.n_rebuilt + sum(map(len, texts)) // 2
            assert now.n_tokens == before.n_tokens  # nothing was computed again by all stages
        for group in hit:
            await fault(service, group, signal.SIGKILL)
            asked = [asyncio.create_task(next_turn(service, index, text)) for index, text in enumerate(texts)]
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            await fault(service, layers[layers.index(group) - 1], signal.SIGKILL)
            assert [(await one)[0] for one in asked] == right
        assert statistics_of(service).running == 0
