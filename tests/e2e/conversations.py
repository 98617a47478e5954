"""Conversations of several turns with a running service, and what came of them: for tests of what is remembered."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from lucevisor.deployment.service import Service
from lucevisor.engine.request import FinishedEvent
from lucevisor.protocol.steps import SamplingParams
from tests.e2e.service import GOLDEN, generate_all

DEMO = Path(__file__).parents[2] / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"
MODELS = {
    "demo": DEMO,
    **{
        name: GOLDEN / name / "model.gguf"
        for name in ("qwen3", "qwen35", "qwen35moe", "gemma4_e2b", "gemma4_moe", "laguna")
    },
}
ANSWER = 12
# The repetition penalty counts the whole prompt, also the part from the cache.
GREEDY = SamplingParams(temperature=0.0, presence_penalty=0.3, repetition_penalty=1.05)


@dataclass
class Told:
    """What came of one arm: tokens of each answer, and what was cached of its prompt."""

    answers: list[list[int]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    n_computed: int = 0


async def ask(
    service: Service, prompt: list[int], turns: list[int], n: int = ANSWER
) -> tuple[list[int], FinishedEvent]:
    return await generate_all(service, prompt, n, GREEDY, turns)


async def converse(service: Service, vocabulary: int, n_conversations: int) -> Told:
    """Conversations of three turns, on two system prompts, one after the other."""
    told, rng = Told(), random.Random(5)
    systems = [[rng.randrange(vocabulary) for _ in range(n)] for n in (130, 150)]
    assert service.engine is not None
    before = service.engine.statistics().steps.n_tokens
    for i in range(n_conversations):
        prompt = list(systems[i % 2])
        turns = [len(prompt)]
        for _ in range(3):
            prompt += [rng.randrange(vocabulary) for _ in range(rng.randrange(5, 40))]
            turns.append(len(prompt))
            prompt += [1, 2]  # what opens an answer
            answer, finished = await ask(service, prompt, turns)
            told.answers.append(answer)
            told.prompts.append(len(prompt))
            told.cached.append(finished.usage.cached_tokens)
            prompt += answer
            turns.append(len(prompt))
    told.n_computed = service.engine.statistics().steps.n_tokens - before
    return told
