"""Golden logits, hidden states and greedy tokens through real daemons, for splits into shards and processes.

Oracle: transformers in float32 (tests/data/golden/README.md).
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from lucevisor.deployment.service import Service
from lucevisor.engine.request import FinishedEvent, GenerationRequest, TokenScore
from lucevisor.engine.rows import IdsOutput
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.protocol.steps import SamplingParams
from tests.e2e.service import GOLDEN, generate, running, write_config
from tests.families.rounding import Bounds, assert_same_tokens, bounds

SPLITS = {
    "unsplit": ({"a": 1}, ["0-8"]),
    "two shards, one process": ({"a": 2}, ["0-3", "3-8"]),
    "two shards, two processes": ({"a": 1, "b": 1}, ["0-5", "5-8"]),
    "three shards, one process": ({"a": 3}, ["0-1", "1-4", "4-8"]),
    "three shards, three processes": ({"a": 1, "b": 1, "c": 1}, ["0-2", "2-6", "6-8"]),
    "four shards, two processes": ({"a": 2, "b": 2}, ["0-1", "1-3", "3-7", "7-8"]),
}
QUICK = ("two shards, one process", "three shards, three processes")


@cache
def qwen35() -> tuple[ModelSpec, Bounds]:
    """The model, and how far two float32 runs of its golden tokens may be from each other."""
    spec = open_spec(GOLDEN / "qwen35" / "model.gguf")
    with np.load(GOLDEN / "qwen35" / "golden.npz") as golden:
        return spec, bounds(spec, golden["input_ids"].tolist())


def assert_golden(rows: IdsOutput, golden: np.lib.npyio.NpzFile) -> None:
    assert rows.hidden is not None
    _, bound = qwen35()
    bound.assert_layers(torch.from_numpy(rows.hidden), torch.from_numpy(golden["hidden"]))
    bound.assert_logits(torch.from_numpy(rows.logits), torch.from_numpy(golden["logits"]))


@pytest.mark.parametrize(
    "split", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SPLITS]
)
async def test_every_split_gives_the_golden_numbers(split: str, tmp_path: Path) -> None:
    groups, ranges = SPLITS[split]
    golden = np.load(GOLDEN / "qwen35" / "golden.npz")
    config = write_config(
        tmp_path, GOLDEN / "qwen35" / "model.gguf", groups, ranges, '[engine]\ndtype = "float32"\nprefill_chunk = 32\n'
    )
    ids = golden["input_ids"].tolist()
    prompt = ids[: int(golden["prompt_len"])]
    async with running(config, tmp_path) as service:
        assert service.engine is not None
        rows = await service.engine.run_ids(ids, want_hidden=True, rows_per_step=32)
        assert_golden(rows, golden)
        assert_same_tokens(qwen35()[0], prompt, await generate(service, prompt, 32), golden["greedy"].tolist())
        prompts = [ids[i : i + 7 * (i + 1)] for i in range(8)]
        alone = [await generate(service, p, 24) for p in prompts]
        together = await asyncio.gather(*(generate(service, p, 24) for p in prompts))
        for p, found, wanted in zip(prompts, together, alone, strict=True):
            assert_same_tokens(qwen35()[0], p, found, wanted)
        pages = service.engine.statistics().pages
        assert {space: use.used for space, use in pages.items()} == dict.fromkeys(pages, 0)


@pytest.mark.parametrize("groups", [{"a": 1, "b": 1}], ids=str)
async def test_prompts_have_the_golden_log_probabilities(groups: dict[str, int], tmp_path: Path) -> None:
    """Also where more prompts run than fit, so that some are preempted and computed again."""
    golden = np.load(GOLDEN / "qwen35" / "golden.npz")
    ids, logits = golden["input_ids"].tolist(), torch.from_numpy(golden["logits"])
    wanted = torch.log_softmax(logits.double(), dim=-1)
    allowed = 2 * qwen35()[1].logits.allowed  # of the token's own logit and of the sum of all
    extra = '[engine]\ndtype = "float32"\nprefill_chunk = 64\nmax_sequences = 3\npages = 5\n'
    ranges = ["0-8"] if len(groups) == 1 else ["0-5", "5-8"]
    config = write_config(tmp_path, GOLDEN / "qwen35" / "model.gguf", groups, ranges, extra)

    async def scores(service: Service, number: int) -> tuple[TokenScore, ...]:
        assert service.engine is not None
        sampling = SamplingParams(temperature=0.0, n_top_logprobs=2)
        request = GenerationRequest(
            request_id=str(number), prompt=ids, max_tokens=60, sampling=sampling, score_prompt=True
        )
        with service.engine.submit(request) as handle:
            *_, last = [event async for event in handle]
        assert isinstance(last, FinishedEvent)
        return last.prompt_scores

    async with running(config, tmp_path) as service:
        found = await asyncio.gather(*(scores(service, i) for i in range(4)))
        assert service.engine is not None
        assert service.engine.statistics().preemptions
    for one in found:
        assert len(one) == len(ids) - 1
        for at, (score, token) in enumerate(zip(one, ids[1:], strict=True)):
            assert abs(score.logprob - float(wanted[at, token])) <= allowed[at]
            assert len(score.top) == 2
            assert score.top[0][1] == pytest.approx(float(wanted[at].max()), abs=float(allowed[at]))


@pytest.mark.slow
async def test_a_file_with_an_mtp_block_gives_the_same_numbers(tmp_path: Path) -> None:
    golden = np.load(GOLDEN / "qwen35" / "golden.npz")
    config = write_config(
        tmp_path, GOLDEN / "qwen35_mtp" / "model.gguf", {"a": 1}, ["0-8"], '[engine]\ndtype = "float32"\n'
    )
    async with running(config, tmp_path) as service:
        assert service.engine is not None
        rows = await service.engine.run_ids(golden["input_ids"].tolist(), want_hidden=True, rows_per_step=64)
        assert_golden(rows, golden)
