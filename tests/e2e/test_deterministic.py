"""``engine.deterministic`` in bfloat16: tokens and log-probabilities keep their bits, whatever else happens.

Oracle: the same requests one after the other, in one group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from lucevisor.deployment.service import Service
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.protocol.steps import SamplingParams
from tests.combinations import slow
from tests.daemons.cpu_kernels import needs_cpu_kernels
from tests.e2e.service import DEMO, running, write_config
from tests.e2e.test_recovery import kill

pytestmark = needs_cpu_kernels
N_TOKENS = 100
SAMPLINGS = (
    SamplingParams(temperature=0.0, n_top_logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.95, seed=5, n_top_logprobs=3),
    SamplingParams(temperature=1.0, seed=6, n_top_logprobs=3, presence_penalty=0.2),
)
ASKED = [
    ([(7 * i % (11 + k) + 3 * k) % 250 + 1 for i in range(60 + 45 * k)], SAMPLINGS[k % len(SAMPLINGS)])
    for k in range(7)
]
"""Prompts that repeat themselves, so that drafts are looked up, of 60 to 330 tokens."""

Answer = list[tuple[int, float | None, tuple[tuple[int, float], ...]]]
"""Tokens, their log-probabilities, and the best of each row."""
Ask = Callable[[Service], Coroutine[Any, Any, list[Answer]]]


def config_of(directory: Path, n_groups: int) -> Path:
    ranges = {1: ["0-8"], 2: ["0-4", "4-8"], 3: ["0-2", "2-5", "5-8"]}[n_groups]
    extra = '[engine]\ndtype = "bfloat16"\ndeterministic = true\nmax_context = 1024\n[draft]\nkind = "off"\n'
    return write_config(directory, DEMO, dict.fromkeys("abc"[:n_groups], 1), ranges, extra)


async def answer(service: Service, k: int) -> Answer:
    assert service.only.engine is not None
    prompt, sampling = ASKED[k]
    request = GenerationRequest(
        request_id=f"request-{k}-{id(object())}", prompt=tuple(prompt), max_tokens=N_TOKENS, sampling=sampling
    )
    with service.only.engine.submit(request) as handle:
        return [(e.token, e.logprob, e.top) async for e in handle if isinstance(e, TokenEvent)]


async def one_by_one(service: Service) -> list[Answer]:
    return [await answer(service, k) for k in range(len(ASKED))]


async def at_once(service: Service) -> list[Answer]:
    return await asyncio.gather(*(answer(service, k) for k in range(len(ASKED))))


async def twice(service: Service) -> list[Answer]:
    """The second time prompts come from the prefix cache."""
    await at_once(service)
    return await at_once(service)


async def killed(service: Service) -> list[Answer]:
    """Each group loses its daemon while all run."""
    answers = asyncio.ensure_future(at_once(service))
    for group in [*service.groups]:
        await asyncio.sleep(0.3)
        if not answers.done():
            await kill(service, group)
    return await answers


async def preempted(service: Service) -> list[Answer]:
    found = await at_once(service)
    assert service.only.engine is not None
    assert service.only.engine.statistics().preemptions
    return found


ALWAYS = "drafts, chunks and two groups"
ARMS: dict[str, tuple[int, list[str], Ask]] = {
    "at once": (1, [], at_once),
    "chunks of 64": (1, ["engine.prefill_chunk=64"], at_once),
    "drafts": (1, ["draft.kind=lookup", "draft.width=4"], at_once),
    ALWAYS: (2, ["engine.prefill_chunk=64", "draft.kind=lookup"], at_once),
    "mtp drafts": (2, ["draft.kind=mtp", f"draft.path={DEMO.with_name('demo-qwen35-22m-mtp-q8_0.gguf')}"], at_once),
    "two groups": (2, [], at_once),
    "three groups": (3, [], one_by_one),
    "prefix cache": (1, ["cache.min_tokens=64"], twice),
    "preempted": (1, ["engine.pages=9", "engine.max_sequences=7", "engine.max_context=512"], preempted),
    "killed": (2, ["recovery.restart_limit=99/60s"], killed),
    "threads": (1, ["groups.a.threads=2"], at_once),
    "all of it": (3, ["engine.prefill_chunk=64", "draft.kind=lookup", "recovery.restart_limit=99/60s"], killed),
}


async def wanted(directory: Path) -> list[Answer]:
    async with running(config_of(directory, 1), directory) as service:
        return await one_by_one(service)


@pytest.mark.parametrize("name", [ALWAYS, *(slow(name, id=name) for name in ARMS if name != ALWAYS)])
async def test_answers_keep_their_bits(tmp_path: Path, name: str) -> None:
    n_groups, overrides, ask = ARMS[name]
    right = await wanted(tmp_path)
    assert all(len(one) == N_TOKENS for one in right)
    async with running(config_of(tmp_path, n_groups), tmp_path, overrides) as service:
        assert await ask(service) == right


@pytest.mark.slow
async def test_answers_keep_their_bits_from_disk_after_a_restart(tmp_path: Path) -> None:
    right, overrides = await wanted(tmp_path), [f"cache.dir={tmp_path / 'snapshots'}", "cache.min_tokens=64"]
    for n_groups in (1, 2):
        async with running(config_of(tmp_path, n_groups), tmp_path, overrides) as service:
            assert await at_once(service) == right
            assert service.only.snapshots is not None
            counts = service.only.snapshots.store.statistics
    assert counts.n_restored > 0


def different(answers: Sequence[Answer], right: Sequence[Answer]) -> list[int]:
    return [k for k, (a, b) in enumerate(zip(answers, right, strict=True)) if a != b]


@pytest.mark.slow
async def test_without_it_some_differ(tmp_path: Path) -> None:
    """Else these tests would show nothing."""
    off = ["engine.deterministic=false"]
    async with running(config_of(tmp_path, 1), tmp_path, off) as service:
        right = await one_by_one(service)
    async with running(config_of(tmp_path, 1), tmp_path, [*off, "engine.prefill_chunk=64"]) as service:
        assert different(await at_once(service), right)
