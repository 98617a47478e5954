"""What 200 requests that share 2,000 tokens take of memory, on real daemons: one prefix, and 200 tails."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from lucevisor.deployment.service import Service
from lucevisor.engine.request import FinishedEvent, GenerationRequest, TokenEvent
from lucevisor.model.families import open_spec
from lucevisor.model.values import PAGE_TOKENS, Space
from lucevisor.protocol.steps import SamplingParams
from tests.combinations import slow
from tests.e2e.service import GOLDEN, running, write_config

N_SHARED = 2000
N_TAIL, N_ANSWER = 20, 24
N_SLOTS = 4
PAGES_EACH = 33
"""Enough for every request to have all its pages for itself, so that sharing is not forced by want."""
CONFIG = f"""
[engine]
dtype = "float32"
prefill_chunk = 1024
max_sequences = {{n}}
max_context = 2112
pages = {{n_pages}}
[cache]
min_tokens = 64
prefix_slots = {N_SLOTS}
[draft]
kind = "off"
"""


@dataclass
class Peak:
    """The most that was seen at once: ids in use by space, and running requests."""

    used: Counter[str]
    running: int = 0

    def look(self, service: Service) -> None:
        assert service.engine is not None
        now = service.engine.statistics()
        self.running = max(self.running, now.running)
        for space, use in now.pages.items():
            self.used[space] = max(self.used[space], use.used)


async def ask(service: Service, number: int, prompt: list[int], peak: Peak) -> FinishedEvent:
    """One request, of a conversation whose system prompt is the shared beginning; looks whenever a token comes."""
    assert service.engine is not None
    request = GenerationRequest(
        request_id=f"shared-{number}",
        prompt=tuple(prompt),
        max_tokens=N_ANSWER,
        sampling=SamplingParams(temperature=0.0),
        turn_boundaries=(N_SHARED,),
    )
    with service.engine.submit(request) as handle:
        async for event in handle:
            if not isinstance(event, TokenEvent):
                return event
            peak.look(service)
    raise AssertionError("the stream ended without a FinishedEvent")


def pages(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)


@pytest.mark.parametrize("n", [20, slow(200)])
@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
async def test_many_requests_take_the_memory_of_one_prefix_and_many_tails(name: str, n: int, tmp_path: Path) -> None:
    model = GOLDEN / name / "model.gguf"
    spec, rng = open_spec(model), random.Random(7)
    half = spec.n_layers // 2
    extra = CONFIG.format(n=n, n_pages=n * PAGES_EACH)
    config = write_config(tmp_path, model, {"a": 1, "b": 1}, [f"0-{half}", f"{half}-{spec.n_layers}"], extra)
    shared = [rng.randrange(spec.vocabulary) for _ in range(N_SHARED)]
    prompts = [shared + [rng.randrange(spec.vocabulary) for _ in range(N_TAIL)] for _ in range(n)]
    peak = Peak(Counter())
    async with running(config, tmp_path) as service:
        assert service.engine is not None
        ended = await asyncio.gather(*(ask(service, i, prompt, peak) for i, prompt in enumerate(prompts)))
        after = service.engine.statistics()
    assert [one.reason for one in ended] == ["length"] * n
    assert peak.running == n
    assert after.preemptions == 0
    # 31 whole pages of the prefix are there once; the page it ends in is copied by everybody, and filled on from there
    tail_pages = pages(N_SHARED + N_TAIL + N_ANSWER) - N_SHARED // PAGE_TOKENS
    most = pages(N_SHARED) + n * tail_pages + N_SLOTS * tail_pages
    print(f"{name}: {dict(peak.used)}, allowed {most} pages; unshared {n * pages(len(prompts[0]) + N_ANSWER)}")
    assert N_SHARED // PAGE_TOKENS + n * tail_pages <= peak.used[Space.FULL] <= most
    if Space.RECURRENT in spec.spaces():
        assert n <= peak.used[Space.RECURRENT] <= n + N_SLOTS
    # and it was computed once
    cached = sum(one.usage.cached_tokens for one in ended)
    assert cached == (n - 1) * N_SHARED
    assert after.steps.n_tokens == N_SHARED + n * (N_TAIL + N_ANSWER - 1)
