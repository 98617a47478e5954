"""Golden logits, hidden states and greedy tokens of every family through real daemons, for splits into processes.

Oracle: transformers in float32 (tests/data/golden/README.md).  All cuts in one process are in tests/families.
"""

from __future__ import annotations

import asyncio
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from lucevisor.deployment.service import Service
from lucevisor.engine.request import FinishedEvent, GenerationRequest, TokenScore
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.protocol.steps import SamplingParams
from tests.combinations import slow
from tests.e2e.service import GOLDEN, TRANSPORTS, generate, running, write_config
from tests.families.rounding import Bounds, assert_same_tokens, bounds

FACTOR = {"laguna": ["model.yarn_attn_factor=file"]}
ENGINE = '[engine]\ndtype = "float32"\nprefill_chunk = {}\n'


@cache
def model_of(name: str) -> tuple[ModelSpec, Bounds]:
    """A golden model, and how far two float32 runs of its golden tokens may be from each other."""
    options = dict(item.removeprefix("model.").split("=") for item in FACTOR.get(name, []))
    spec = open_spec(GOLDEN / name / "model.gguf", options)
    with np.load(GOLDEN / name / "golden.npz") as golden:
        return spec, bounds(spec, golden["input_ids"].tolist())


@pytest.mark.parametrize(
    ("name", "groups", "cuts"),
    [
        ("qwen35", {"a": 2}, [3]),
        ("qwen35", {"a": 1, "b": 1, "c": 1}, [2, 6]),
        ("qwen35moe", {"a": 1, "b": 1}, [1]),
        ("llama", {"a": 1, "b": 1}, [2]),
        ("qwen2", {"a": 1, "b": 1}, [1]),
        ("gemma3", {"a": 1, "b": 1}, [3]),
        ("granite", {"a": 1, "b": 1}, [1]),
        slow("granitemoe", {"a": 1, "b": 1}, [2]),
        ("mistral3", {"a": 1, "b": 1}, [2]),
        ("glm4moe", {"a": 1, "b": 1}, [2]),
        ("gpt_oss", {"a": 1, "b": 1, "c": 1}, [1, 2]),
        slow("qwen3moe", {"a": 1, "b": 1}, [2]),
        ("qwen3next", {"a": 1, "b": 1, "c": 1}, [1, 2]),
        ("gemma4_e2b", {"a": 1, "b": 1}, [3]),
        ("laguna_mscale", {"a": 1, "b": 1}, [4]),
        slow("qwen35", {"a": 1}, []),
        slow("qwen35", {"a": 2, "b": 2}, [1, 3, 7]),
        slow("qwen3", {"a": 1, "b": 1}, [3]),
        slow("gemma4_moe", {"a": 1, "b": 1}, [2]),
        slow("laguna", {"a": 1, "b": 1}, [2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_split_gives_the_golden_numbers(
    transport: str, name: str, groups: dict[str, int], cuts: list[int], tmp_path: Path
) -> None:
    spec, bound = model_of(name)
    golden = np.load(GOLDEN / name / "golden.npz")
    ids = golden["input_ids"].tolist()
    prompt = ids[: int(golden["prompt_len"])]
    ends = [0, *cuts, spec.n_layers]
    ranges = [f"{start}-{stop}" for start, stop in pairwise(ends)]
    config = write_config(tmp_path, GOLDEN / name / "model.gguf", groups, ranges, ENGINE.format(32), transport)
    async with running(config, tmp_path, FACTOR.get(name, [])) as service:
        assert service.only.engine is not None
        inet = [
            connection
            for group in service.groups.values()
            for connection in psutil.Process(group.pid).net_connections("inet")
        ]
        assert {connection.laddr.ip for connection in inet} == ({"127.0.0.1"} if transport == "tcp" else set())
        rows = await service.only.engine.run_ids(ids, want_hidden=True, rows_per_step=32)
        assert rows.hidden is not None
        bound.assert_layers(torch.from_numpy(rows.hidden), torch.from_numpy(golden["hidden"]))
        bound.assert_logits(torch.from_numpy(rows.logits), torch.from_numpy(golden["logits"]))
        assert_same_tokens(spec, prompt, await generate(service, prompt, 32), golden["greedy"].tolist())
        prompts = [ids[i : i + 7 * (i + 1)] for i in range(8)]
        alone = [await generate(service, p, 24) for p in prompts]
        together = await asyncio.gather(*(generate(service, p, 24) for p in prompts))
        for p, found, wanted in zip(prompts, together, alone, strict=True):
            assert_same_tokens(spec, p, found, wanted)
        pages = service.only.engine.statistics().pages
        assert {space: use.used for space, use in pages.items()} == dict.fromkeys(pages, 0)


async def test_prompts_have_the_golden_log_probabilities(tmp_path: Path) -> None:
    """Also where more prompts run than fit, so that some are preempted and computed again."""
    golden = np.load(GOLDEN / "qwen35" / "golden.npz")
    ids, logits = golden["input_ids"].tolist(), torch.from_numpy(golden["logits"])
    wanted = torch.log_softmax(logits.double(), dim=-1)
    allowed = 2 * model_of("qwen35")[1].logits.allowed  # of the token's own logit and of the sum of all
    extra = ENGINE.format(64) + "max_sequences = 3\npages = 5\n"
    config = write_config(tmp_path, GOLDEN / "qwen35" / "model.gguf", {"a": 1, "b": 1}, ["0-5", "5-8"], extra)

    async def scores(service: Service, number: int) -> tuple[TokenScore, ...]:
        assert service.only.engine is not None
        sampling = SamplingParams(temperature=0.0, n_top_logprobs=2)
        request = GenerationRequest(
            request_id=str(number), prompt=ids, max_tokens=60, sampling=sampling, score_prompt=True
        )
        with service.only.engine.submit(request) as handle:
            *_, last = [event async for event in handle]
        assert isinstance(last, FinishedEvent)
        return last.prompt_scores

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
