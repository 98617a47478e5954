"""Snapshots with real daemons: identical greedy tokens after a restart and under another split, only new tokens
computed, and never a wrong token from a file or a daemon that is not what it should be.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lucevisor.deployment.service import Service
from lucevisor.model.families import open_spec
from tests.combinations import slow
from tests.e2e.service import (
    ANSWER,
    MODELS,
    PROMPT,
    Place,
    Told,
    ask,
    converse,
    restore_always,
    running,
    snapshots_of,
    told_of,
)
from tests.waiting import until


async def converse_and_save(service: Service, vocabulary: int, n: int) -> Told:
    told = await converse(service, vocabulary, n)
    await snapshots_of(service).save_all(60.0)
    return told


async def four_arms(place: Place, n: int) -> None:
    """Cache off; cold and warm in one process; warm after a restart."""
    spec = open_spec(place.model)
    async with running(place.config(slots=0, on=False), place.directory) as service:
        off = await converse(service, spec.vocabulary, n)
    async with running(place.config(), place.directory) as service:
        cold = await converse_and_save(service, spec.vocabulary, n)
        warm = await converse_and_save(service, spec.vocabulary, n)
        assert told_of(service)["failed"] == 0
    async with running(place.config(), place.directory) as service:
        restore_always(service)
        again = await converse(service, spec.vocabulary, n)
        counts = told_of(service)
        assert service.only.engine is not None
        tokens = service.only.engine.statistics().cache.tokens
        assert snapshots_of(service).store.statistics.restored_bytes > 0
    assert off.answers == cold.answers == warm.answers == again.answers
    assert counts["failed"] == 0
    assert counts["restored"] > 0
    assert tokens["disk"] > 0
    assert tokens["device"] + tokens["disk"] == sum(again.cached)
    assert again.n_computed == sum(again.prompts) - sum(again.cached) + len(again.answers) * (ANSWER - 1)
    # A file of few tokens more than the devices have is not written.
    assert sum(again.cached) > 0.9 * sum(warm.cached)
    assert all(n_again < n_prompt for n_prompt, n_again in zip(again.prompts, again.cached, strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "states", "n"),
    [
        ("qwen35", "host", 2),
        *(slow(name, "device", 40) for name in MODELS),
    ],
)
async def test_off_cold_warm_and_after_a_restart_give_the_same_tokens(
    name: str, states: str, n: int, tmp_path: Path
) -> None:
    await four_arms(Place(MODELS[name], tmp_path, states), n)


async def across_splits(place: Place, n: int) -> None:
    """Saved by three groups, used by two and by one with another number of pages."""
    vocabulary = open_spec(place.model).vocabulary
    async with running(place.config(3), place.directory) as service:
        cold = await converse_and_save(service, vocabulary, n)
        assert service.only.placement is not None
        ranges = [stage.layers for stage in service.only.placement.stages]
        assert len(ranges) == 3
    for n_groups, pages in ((2, 900), (1, 1500)):
        async with running(place.config(n_groups, pages=pages), place.directory) as service:
            restore_always(service)
            told = await converse(service, vocabulary, n)
            assert told.answers == cold.answers
            assert told_of(service)["restored"] >= n
            assert told_of(service)["failed"] == 0
            assert told.n_computed < sum(told.prompts) / 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["qwen35", *(slow(name) for name in MODELS if name != "qwen35")])
async def test_saved_under_one_split_and_used_under_others(name: str, tmp_path: Path) -> None:
    await across_splits(Place(MODELS[name], tmp_path), 2)


async def test_an_evicted_slot_goes_to_disk_and_comes_back(tmp_path: Path) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    prompts = [[first, *PROMPT] for first in range(4)]
    async with running(place.config(slots=1), place.directory) as service:
        assert service.only.engine is not None
        service.only.engine.prefixes.hooks.on_slot = lambda slot: None  # no turn is saved
        restore_always(service)
        cold = [await ask(service, prompt, []) for prompt in prompts]
        await until(lambda: told_of(service)["saved"] > 0)
        saved = [tuple(e.snapshot.tokens) for e in snapshots_of(service).store.entries]
        warm = [await ask(service, prompt, []) for prompt in prompts]
    assert all(list(tokens[:301]) == prompts[tokens[0]][: len(tokens)] for tokens in saved)
    assert [tokens for tokens, _ in cold] == [tokens for tokens, _ in warm]
    assert sum(finished.usage.cached_tokens >= 256 for _, finished in warm) > 0


async def test_a_stop_saves_and_requests_that_want_the_same_file_wait_for_one_restore(tmp_path: Path) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    async with running(place.config(), place.directory) as service:
        assert service.only.engine is not None
        service.only.engine.prefixes.hooks.on_slot = lambda slot: None
        expected, _ = await ask(service, PROMPT, [])
        assert not place.files()
        await service.stop()
    assert place.files()
    assert not list(place.snapshots.glob("*.partial"))
    async with running(place.config(), place.directory) as service:
        answers = await asyncio.gather(*(ask(service, PROMPT, []) for _ in range(6)))
        assert told_of(service)["restored"] == 1
    assert all(tokens == expected for tokens, _ in answers)
    assert all(finished.usage.cached_tokens > 200 for _, finished in answers)
