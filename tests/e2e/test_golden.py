"""Golden logits, hidden states and greedy tokens of every family through real daemons, for splits into processes.

Oracle: transformers in float32 (tests/data/golden/README.md).  All cuts in one process are in tests/families.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from lucevisor.deployment.service import Service
from lucevisor.engine.request import FinishedEvent, GenerationRequest, TokenLogprob
from lucevisor.protocol.steps import SamplingParams
from tests.combinations import slow
from tests.e2e.golden import ENGINE, FACTOR, assert_golden_numbers, model_of
from tests.e2e.service import GOLDEN, TRANSPORTS, generate, running, write_config

SPLITS = [
    ("qwen35", {"a": 2}, [3]),
    ("qwen35", {"a": 1, "b": 1, "c": 1}, [2, 6]),
    ("qwen35moe", {"a": 1, "b": 1}, [1]),
    ("llama", {"a": 1, "b": 1}, [2]),
    ("qwen2", {"a": 1, "b": 1}, [1]),
    ("gemma3", {"a": 1, "b": 1}, [3]),
    ("granite", {"a": 1, "b": 1}, [1]),
    ("mistral3", {"a": 1, "b": 1}, [2]),
    ("gpt_oss", {"a": 1, "b": 1, "c": 1}, [1, 2]),
    ("qwen3next", {"a": 1, "b": 1, "c": 1}, [1, 2]),
    ("glm4moe", {"a": 1, "b": 1}, [2]),
    ("gemma4_e2b", {"a": 1, "b": 1}, [3]),
    ("laguna_mscale", {"a": 1, "b": 1}, [4]),
]
MORE = [
    ("granitemoe", {"a": 1, "b": 1}, [2]),
    ("qwen3moe", {"a": 1, "b": 1}, [2]),
    ("qwen35", {"a": 1}, []),
    ("qwen35", {"a": 2, "b": 2}, [1, 3, 7]),
    ("qwen3", {"a": 1, "b": 1}, [3]),
    ("gemma4_moe", {"a": 1, "b": 1}, [2]),
    ("laguna", {"a": 1, "b": 1}, [2]),
]
ALWAYS = [(TRANSPORTS[i % 2], *split) for i, split in enumerate(SPLITS)]
"""Rows of all families cross both transports in the same way."""


@pytest.mark.parametrize(
    ("transport", "name", "groups", "cuts"),
    [*ALWAYS, *(slow(to, *split) for to in TRANSPORTS for split in SPLITS + MORE if (to, *split) not in ALWAYS)],
    ids=str,
)
async def test_every_split_gives_the_golden_numbers(
    transport: str, name: str, groups: dict[str, int], cuts: list[int], tmp_path: Path
) -> None:
    ends = [0, *cuts, model_of(name)[0].n_layers]
    ranges = [f"{start}-{stop}" for start, stop in pairwise(ends)]
    config = write_config(tmp_path, GOLDEN / name / "model.gguf", groups, ranges, ENGINE.format(32), transport)
    async with running(config, tmp_path, FACTOR.get(name, [])) as service:
        inet = [
            connection
            for group in service.groups.values()
            for connection in psutil.Process(group.pid).net_connections("inet")
        ]
        assert {connection.laddr.ip for connection in inet} == ({"127.0.0.1"} if transport == "tcp" else set())
        await assert_golden_numbers(service, name)


async def test_prompts_have_the_golden_log_probabilities(tmp_path: Path) -> None:
    """Also where more prompts run than fit, so that some are preempted and computed again."""
    golden = np.load(GOLDEN / "qwen35" / "golden.npz")
    ids, logits = golden["input_ids"].tolist(), torch.from_numpy(golden["logits"])
    wanted = torch.log_softmax(logits.double(), dim=-1)
    allowed = 2 * model_of("qwen35")[1].logits.allowed  # of the token's own logit and of the sum of all
    extra = ENGINE.format(64) + "max_sequences = 3\npages = 5\n"
    config = write_config(tmp_path, GOLDEN / "qwen35" / "model.gguf", {"a": 1, "b": 1}, ["0-5", "5-8"], extra)

    async def scores(service: Service, number: int) -> tuple[TokenLogprob, ...]:
        assert service.only.engine is not None
        sampling = SamplingParams(temperature=0.0, n_top_logprobs=2)
        request = GenerationRequest(
            request_id=str(number), prompt=ids, max_tokens=60, sampling=sampling, prompt_logprobs=True
        )
        with service.only.engine.submit(request) as handle:
            *_, last = [event async for event in handle]
        assert isinstance(last, FinishedEvent)
        return last.prompt_logprobs

    async with running(config, tmp_path) as service:
        found = await asyncio.gather(*(scores(service, i) for i in range(4)))
        assert service.only.engine is not None
        assert service.only.engine.statistics().preemptions
    for one in found:
        assert len(one) == len(ids) - 1
        for at, (score, token) in enumerate(zip(one, ids[1:], strict=True)):
            assert abs(score.logprob - float(wanted[at, token])) <= allowed[at]
            assert len(score.top) == 2
            assert score.top[0][1] == pytest.approx(float(wanted[at].max()), abs=float(allowed[at]))


async def test_greedy_tokens_with_q8_0_keys_and_values(tmp_path: Path) -> None:
    model = GOLDEN / "qwen35" / "model.gguf"
    config = write_config(tmp_path, model, {"left": 1, "right": 1}, ["0-4", "4-8"])
    with np.load(GOLDEN / "qwen35" / "golden.npz") as golden:
        prompt = golden["input_ids"][: int(golden["prompt_len"])].tolist()
        wanted = golden["greedy"].tolist()
    async with running(config, tmp_path, ["engine.dtype=float32", "engine.kv_dtype=q8_0"]) as service:
        assert service.only.placement is not None
        assert service.only.placement.kv_dtype == "q8_0"
        assert await generate(service, prompt, len(wanted)) == wanted
