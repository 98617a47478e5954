"""LoRA adapters of real daemons: several at once, over groups, in each tier of the prefix cache, after restarts and
losses.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from lucevisor.config import load
from lucevisor.deployment.admin_operations import AdminOperations
from lucevisor.deployment.service import Service
from lucevisor.model.families import open_spec
from lucevisor.model.lora_files import open_adapter, with_adapters
from lucevisor.supervision.machine import SupervisionLimits
from tests.combinations import slow
from tests.e2e.service import (
    GOLDEN,
    PROMPT,
    SPLITS,
    generate_all,
    restore_always,
    running,
    snapshots_of,
    told_of,
    write_config,
)
from tests.families.adapters import random_pairs, write_adapter
from tests.families.pipeline import Pipeline, load_stages

N_ADAPTERS = 8
NAMES = ["", *(f"a{i}" for i in range(N_ADAPTERS))]
N_TOKENS = 8
TEXT = [token % 280 for token in PROMPT[:200]]
EXTRA = """
[engine]
dtype = "float32"
prefill_chunk = 64
max_sequences = 12
[cache]
min_tokens = 8
prefix_slots = 64
dir = "{directory}"
[draft]
kind = "off"
"""
BRISK = SupervisionLimits(backoff_min_s=0.02, backoff_max_s=0.02, spare_delay_s=0.02)


@pytest.fixture(params=["qwen35", slow("gemma4_e2b"), slow("llama")])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def configure(
    folder: Path,
    name: str,
    n_groups: int,
    scales: Sequence[float] = (1.0,) * N_ADAPTERS,
    transport: str = "shared_memory",
) -> Path:
    """A configuration of a golden model with eight adapters."""
    spec = open_spec(GOLDEN / name / "model.gguf")
    text = EXTRA.format(directory=folder / "snapshots")
    for i, scale in enumerate(scales):
        file = folder / f"{i}.gguf"
        if not file.exists():
            write_adapter(file, spec.architecture, random_pairs(spec, 1 + i, i), alpha=1.0 + i)
        text += f'[lora.a{i}]\npath = "{file.name}"\nscale = {scale}\n'
    groups = dict.fromkeys("abc"[:n_groups], 1)
    path = write_config(folder, GOLDEN / name / "model.gguf", groups, ["0-1"] * n_groups, text, transport)
    whole = str(["0-1"] * n_groups).replace("'", '"')
    path.write_text(path.read_text().replace(whole, f"[{SPLITS[n_groups]}]"))
    return path


def expected(folder: Path, name: str, prompt: Sequence[int]) -> list[list[int]]:
    """The greedy tokens of each adapter, without a service."""
    spec = open_spec(GOLDEN / name / "model.gguf")
    spec = with_adapters(spec, [open_adapter(f"a{i}", folder / f"{i}.gguf", 1.0, spec) for i in range(N_ADAPTERS)])
    pipeline = Pipeline(spec, load_stages(spec))
    found = []
    for sequence, adapter in enumerate(NAMES):
        pipeline.open(sequence, adapter=adapter)
        found.append(pipeline.greedy(sequence, prompt, N_TOKENS))
        pipeline.close(sequence)
    return found


async def ask_all(service: Service, prompt: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Answers of the model and all adapters, asked together, and how many tokens of each prompt were cached."""
    answers = await asyncio.gather(*(generate_all(service, prompt, N_TOKENS, adapter=one) for one in NAMES))
    return [tokens for tokens, _ in answers], [finished.usage.cached_tokens for _, finished in answers]


@pytest.mark.parametrize("n_groups", [slow(1), 2, slow(3)])
async def test_each_has_its_answers_its_prefixes_and_its_files(tmp_path: Path, name: str, n_groups: int) -> None:
    path = configure(tmp_path, name, n_groups)
    longer = [*TEXT, 7, 8, 9]
    wanted = expected(tmp_path, name, longer)
    assert len({tuple(tokens) for tokens in wanted}) > N_ADAPTERS // 2
    async with running(path, tmp_path) as service:
        assert (await ask_all(service, TEXT))[1] == [0] * len(NAMES), "no page is another adapter's"
        assert await ask_all(service, longer) == (wanted, [len(TEXT)] * len(NAMES))
        await snapshots_of(service).save_all(60.0)
        assert told_of(service)["failed"] == 0
    async with running(path, tmp_path) as service:
        restore_always(service)
        answers, cached = await ask_all(service, longer)
        assert answers == wanted
        assert min(cached) >= len(TEXT), "each from its own file"
        assert told_of(service)["restored"] == len(NAMES)
    other = configure(tmp_path, name, n_groups, [2.0] * N_ADAPTERS)
    async with running(other, tmp_path) as service:
        answers, cached = await ask_all(service, longer)
        assert cached[0] >= len(TEXT)
        assert cached[1:] == [0] * N_ADAPTERS, "another scale makes another state"
        assert answers[0] == wanted[0]
        changed = [tokens != before for tokens, before in zip(answers[1:], wanted[1:], strict=True)]
        assert sum(changed) > N_ADAPTERS // 2


async def test_daemons_are_killed_and_restarted_while_adapters_answer(tmp_path: Path, name: str) -> None:
    path, n_tokens = configure(tmp_path, name, 2), 60
    settings = ["recovery.restart_limit=9999/60s", "recovery.spares=1", "cache.prefix_slots=0"]
    async with running(path, tmp_path, settings, limits=BRISK) as service:

        async def ask(adapter: str) -> list[int]:
            tokens, finished = await generate_all(service, TEXT, n_tokens, adapter=adapter)
            assert finished.error is None, finished
            return tokens

        wanted = [await ask(adapter) for adapter in NAMES]
        for group in service.groups:
            asked = [asyncio.create_task(ask(adapter)) for adapter in NAMES]
            assert service.only.engine is not None
            while service.only.engine.statistics().running < len(NAMES):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            pid = service.groups[group].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.gather(*asked) == wanted
        asked = [asyncio.create_task(ask(adapter)) for adapter in NAMES]
        await AdminOperations(service).restart_all([*service.groups][:1], now=False)
        assert await asyncio.gather(*asked) == wanted
        assert service.only.engine is not None
        assert service.only.engine.statistics().recovery.n_continued >= len(NAMES)


@pytest.mark.parametrize("draft", ["lookup", "mtp"])
async def test_drafts_of_the_model_change_no_token(tmp_path: Path, draft: str) -> None:
    """Over TCP, where a daemon may have no files of its own."""
    path, prompt = configure(tmp_path, "qwen35_mtp", 2, transport="tcp"), TEXT[:60] * 2
    wanted = expected(tmp_path, "qwen35_mtp", prompt)
    async with running(path, tmp_path, [f"draft.kind={draft}", "cache.dir="]) as service:
        assert service.only.placement is not None
        assert service.only.placement.drafting.max_drafts > 0
        assert (await ask_all(service, prompt))[0] == wanted


def test_a_file_that_fits_no_tensor_is_refused_by_its_key(tmp_path: Path) -> None:
    from lucevisor.app.model_files import open_models
    from lucevisor.errors import ConfigError

    path = configure(tmp_path, "qwen35", 1)
    spec = open_spec(GOLDEN / "llama" / "model.gguf")
    write_adapter(tmp_path / "0.gguf", "llama", random_pairs(spec, 2, 0))
    with pytest.raises(ConfigError, match=r"lora\.a0\.path.*general\.architecture: is 'llama', expected 'qwen35'"):
        open_models(load(path))
