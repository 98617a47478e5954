"""Drafts never change the output: every drafter, every placement of it, every family, beside plain greedy decoding.

Oracle: the same service without drafts, in float32.  A token may differ only where rounding may swap its rivals
(tests/families/rounding.py).  The drafters: those of the golden fixtures, whose drafts are partly right, random ones,
whose drafts are wrong, the demo model's own, and lookup.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from lucevisor.config import load
from lucevisor.deployment.service import Service
from lucevisor.engine.request import GenerationRequest, TokenEvent
from lucevisor.engine.spec_decode.controller import SpecDecodeController
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.protocol.steps import SamplingParams
from tests.e2e.drafters import write_random_assistant, write_random_dflash
from tests.e2e.service import DATA, DEMO, GOLDEN, generate_all, restore_always, running, write_config
from tests.families.rounding import assert_same_tokens
from tests.waiting import until

DEMO_DRAFTERS = DEMO.parent
FAMILIES = ("qwen3", "qwen35", "qwen35moe", "qwen3next", "gemma4_e2b", "gemma4_moe", "laguna_mscale")
ASSISTED = ("gemma4_e2b", "gemma4_moe")
ENGINE = '[engine]\ndtype = "float32"\nprefill_chunk = 64\nmax_sequences = 8\n'
WIDTH = 5  # drafts of a step: fixed, else useless drafters are soon asked no more; the demo model's adapts
PLACES = {"tail": "", "head": "a:0", "alone": "d:0"}
RANDOM = {"random": write_random_dflash, "assistant": write_random_assistant}
GROUPS = {1: {"a": 1}, 2: {"a": 1, "b": 1}, 3: {"a": 1, "b": 1, "c": 1}}


@dataclass(frozen=True)
class Case:
    """A target, a kind of drafter and its file (of RANDOM: made for the target; "": the kind needs none)."""

    model: Path
    kind: str
    drafter: str = ""
    prompts: str = ""  # golden.npz of prompts that the drafter was trained on

    def draft_file(self, directory: Path) -> Path | None:
        if self.drafter in RANDOM:
            return RANDOM[self.drafter](directory / "drafter.gguf", spec_of(self.model))
        return Path(self.drafter) if self.drafter else None


GOLDEN_TARGET = GOLDEN / "qwen35" / "model.gguf"
MTP = GOLDEN / "qwen35_mtp_draft"
CASES = {  # those that take longest first
    "demo-dflash": Case(DEMO, "dflash", str(DEMO_DRAFTERS / "demo-qwen35-22m-dflash2-q4_0.gguf")),
    "demo-mtp": Case(DEMO, "mtp", str(DEMO_DRAFTERS / "demo-qwen35-22m-mtp-q8_0.gguf")),
    **{f"{name}-random": Case(GOLDEN / name / "model.gguf", "dflash", "random") for name in FAMILIES},
    **{f"{name}-lookup": Case(GOLDEN / name / "model.gguf", "lookup") for name in FAMILIES},
    "dflash": Case(GOLDEN_TARGET, "dflash", str(GOLDEN / "dflash" / "drafter-upstream.gguf"), "dflash"),
    "dflash-lucebox": Case(GOLDEN_TARGET, "dflash", str(GOLDEN / "dflash" / "drafter-lucebox.gguf"), "dflash"),
    "dflash2": Case(GOLDEN_TARGET, "dflash", str(GOLDEN / "dflash2" / "drafter.gguf"), "dflash2"),
    **{f"{name}-assistant": Case(GOLDEN / name / "model.gguf", "mtp", "assistant") for name in ASSISTED},
    "mtp": Case(MTP / "model.gguf", "mtp", "", "qwen35_mtp_draft"),
    "model": Case(GOLDEN / "qwen3" / "model.gguf", "model", str(GOLDEN / "qwen3moe" / "model.gguf")),
    "same-model": Case(GOLDEN / "qwen3" / "model.gguf", "model", str(GOLDEN / "qwen3" / "model.gguf")),
}


@cache
def spec_of(model: Path) -> ModelSpec:
    return open_spec(model)


def prompts_of(case: Case, n: int) -> list[list[int]]:
    """Prompts that the drafter knows, then random ones; of the demo model, held-out questions."""
    if case.model == DEMO:
        stored = json.loads((DATA / "demo-prompts.json").read_text())
        return [prompt["tokens"] for prompt in stored][:n]
    known = []
    if case.prompts:
        with np.load(GOLDEN / case.prompts / "golden.npz") as golden:
            ids = golden["input_ids"].tolist()
        known = [ids[:40], ids[:24], ids[:16]]
    rng = random.Random(7)
    made = [[rng.randrange(256) for _ in range(rng.randrange(10, 90))] for _ in range(n)]
    return [*known, *made][:n]


def config_of(
    case: Case, directory: Path, n_groups: int, place: str, cache_dir: Path | None = None, n_prompts: int = 8
) -> Path:
    draft = [f'[draft]\nkind = "{case.kind}"']
    if case.model != DEMO and case.kind != "off":
        draft.append(f"width = {WIDTH}")
    if (file := case.draft_file(directory)) is not None:
        draft.append(f'path = "{file}"')
    if case.kind != "lookup" and PLACES[place]:
        draft.append(f'device = "{PLACES[place]}"')
    alone = '[groups.d]\nbackend = "cpu"\nthreads = 1\n' if place == "alone" and case.kind != "lookup" else ""
    kept = f'[cache]\nmin_tokens = 8\nprefix_slots = {4 * n_prompts + 8}\ndir = "{cache_dir or ""}"\n'
    engine = f"{ENGINE}pages = {200 + 20 * n_prompts}\n"
    groups = GROUPS[n_groups]
    path = write_config(directory, case.model, groups, ["0-1"] * n_groups, f"{engine}{kept}{alone}" + "\n".join(draft))
    ranges = str(["0-1"] * n_groups).replace("'", '"')
    path.write_text(path.read_text().replace(ranges, str([1.0] * n_groups)))
    return path


async def answers(
    service: Service, prompts: list[list[int]], turns: list[int], n: int, streams: int
) -> list[list[int]]:
    """Greedy answers, ``streams`` at a time, beside a neighbour that is aborted; a turn of prompt i ends at
    ``turns[i]``.
    """
    gate, found = asyncio.Semaphore(streams), {}

    async def one(i: int) -> None:
        async with gate:
            found[i], finished = await generate_all(service, prompts[i], n, turns=[turns[i]])
            assert finished.reason == "length", finished

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(abort_one(service, prompts[0][:7], n))
        for i in range(len(prompts)):
            tasks.create_task(one(i))
    return [found[i] for i in range(len(prompts))]


async def abort_one(service: Service, prompt: list[int], n: int) -> None:
    assert service.only.engine is not None
    request = GenerationRequest(
        request_id=f"aborted-{random.random()}",
        prompt=tuple(prompt),
        max_tokens=n,
        sampling=SamplingParams(temperature=0.0),
    )
    seen = 0
    with contextlib.suppress(StopAsyncIteration), service.only.engine.submit(request) as handle:
        async for event in handle:
            seen += isinstance(event, TokenEvent)
            if seen == 5:
                return


async def plain(case: Case, directory: Path, prompts: list[list[int]], turns: list[int], n: int) -> list[list[int]]:
    """Answers without drafts, computed once for all workers of a test run."""
    run = directory.parents[1 if "PYTEST_XDIST_WORKER" in os.environ else 0]
    kept = run / f"plain-{case.model.parent.name}-{case.prompts}-{len(prompts)}-{n}.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            off = Case(case.model, "off")
            async with running(
                config_of(off, directory, 1, "tail", n_prompts=len(prompts)), directory / "plain"
            ) as service:
                kept.write_text(json.dumps(await answers(service, prompts, turns, n, 8)))
        found: list[list[int]] = json.loads(kept.read_text())
    return found


def assert_lossless(case: Case, prompts: list[list[int]], found: list[list[int]], wanted: list[list[int]]) -> None:
    for prompt, some, other in zip(prompts, found, wanted, strict=True):
        assert_same_tokens(spec_of(case.model), prompt, some, other)


async def check(
    case: Case, tmp_path: Path, n_groups: int, place: str, n_prompts: int, n: int, n_again: int, transport: str = ""
) -> None:
    """Fresh; the last ``n_again`` of ``n`` tokens again, restored from memory, and after a restart from disk."""
    for name in ("plain", "one", "two"):
        (tmp_path / name).mkdir()
    prompts = prompts_of(case, n_prompts)
    turns = [len(prompt) - 1 for prompt in prompts]
    wanted = await plain(case, tmp_path, prompts, turns, n)
    again = [prompt + answer[:-n_again] for prompt, answer in zip(prompts, wanted, strict=True)]
    rest = [answer[-n_again:] for answer in wanted]
    config = config_of(case, tmp_path, n_groups, place, tmp_path / "cache", n_prompts)
    transports = [f"groups.{group}.transport={transport}" for group in load(config).groups] if transport else []
    async with running(config, tmp_path / "one", transports) as service:
        assert service.only.engine is not None
        assert_lossless(case, prompts, await answers(service, prompts, turns, n, 8), wanted)
        assert_lossless(case, again, await answers(service, again, turns, n_again, 8), rest)
        assert service.only.engine.statistics().cache.n_hits
        await service.save_prefixes(120.0)  # what was saved meanwhile are the longest slots: the answers' ends
    async with running(config, tmp_path / "two", transports) as service:
        assert service.only.engine is not None
        restore_always(service)
        assert_lossless(case, again, await answers(service, again, turns, n_again, 8), rest)
        if case.prompts:  # those of the others may be shorter than what is worth a file
            assert service.only.engine.statistics().cache.tokens["disk"] > sum(turns) // 2


SHORT = [
    ("dflash2", 2, "alone", "tcp"), ("mtp", 1, "tail", ""), ("laguna_mscale-random", 2, "head", "tcp"),
    ("gemma4_e2b-assistant", 2, "alone", ""), ("qwen35moe-lookup", 2, "tail", ""), ("model", 2, "alone", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "n_groups", "place", "transport"), SHORT)
async def test_output_is_that_of_plain_decoding(
    name: str, n_groups: int, place: str, transport: str, tmp_path: Path
) -> None:
    await check(CASES[name], tmp_path, n_groups, place, n_prompts=4, n=24, n_again=12, transport=transport)


async def test_every_draft_of_a_model_for_itself_is_accepted(tmp_path: Path) -> None:
    case = CASES["same-model"]
    prompts = prompts_of(case, 4)
    async with running(config_of(case, tmp_path, 2, "alone"), tmp_path) as service:
        await until(lambda: service.only.deployment.drafting)
        await answers(service, prompts, [len(prompt) - 1 for prompt in prompts], 40, 2)
        assert service.only.engine is not None
        drafts = service.only.engine.statistics().drafts
        assert drafts.n_accepted == drafts.n_verified > 0, drafts


@pytest.mark.parametrize(("model", "longest"), [(GOLDEN / "qwen3" / "model.gguf", 31), (DEMO, 15)])
async def test_a_copied_text_is_verified_in_long_slices(
    monkeypatch: pytest.MonkeyPatch, model: Path, longest: int, tmp_path: Path
) -> None:
    """As many drafts as a slice takes, without recurrent states and with them; whatever steps take."""
    monkeypatch.setattr(
        SpecDecodeController, "num_verify_tokens", lambda _, offers, n: max(len(offer.tokens) for _, offer in offers)
    )
    case, n = Case(model, "lookup"), 80
    for directory in ("plain", "long"):
        (tmp_path / directory).mkdir()
    prompts = prompts_of(case, 2)
    turns = [len(prompt) - 1 for prompt in prompts]
    answered = await plain(case, tmp_path, prompts, turns, n)
    prompts = [prompt + answer + prompt for prompt, answer in zip(prompts, answered, strict=True)]
    wanted = await plain(case, tmp_path, prompts, turns, 2 * n)
    async with running(config_of(case, tmp_path, 2, "tail"), tmp_path / "long", ["draft.width=auto"]) as service:
        assert_lossless(case, prompts, await answers(service, prompts, turns, 2 * n, 1), wanted)
        assert service.only.engine is not None
        drafts = service.only.engine.statistics().drafts
        assert len(drafts.verified) == longest
        assert drafts.accepted[-1] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n_groups", GROUPS)
@pytest.mark.parametrize("place", PLACES)
async def test_output_of_many_prompts_is_that_of_plain_decoding(
    name: str, n_groups: int, place: str, tmp_path: Path
) -> None:
    case = CASES[name]
    if case.kind == "lookup" and place != "tail":
        pytest.skip("lookup runs on no device")
    await check(case, tmp_path, n_groups, place, n_prompts=100, n=128, n_again=16)
