"""Snapshots with real daemons: identical greedy tokens after a restart and under another split, only new tokens
computed, and never a wrong token from a file or a daemon that is not what it should be.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from lucevisor.deployment.service import Service
from lucevisor.model.families import open_spec
from lucevisor.snapshots import disk
from lucevisor.snapshots.file_format import pack
from lucevisor.snapshots.manager import SnapshotManager
from lucevisor.snapshots.policy import SnapshotSpeeds
from lucevisor.snapshots.speeds import SpeedMeter
from tests.e2e.conversations import ANSWER, MODELS, Told, ask, converse
from tests.e2e.service import running, write_config

MIN_TOKENS = 8
CONFIG = """
[engine]
dtype = "float32"
prefill_chunk = 64
max_sequences = 4
pages = {pages}
[cache]
min_tokens = {min_tokens}
prefix_slots = {slots}
states = "{states}"
dir = "{directory}"
"""
SPLITS = {1: "1", 2: "0.5,0.5", 3: "0.08,0.46,0.46"}
PROMPT = [random.Random(3).randrange(5, 500) for _ in range(300)]


@pytest.fixture(autouse=True)
def _computing_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is with models that are worth a file: else these small ones are computed before a file is open."""
    monkeypatch.setattr(SpeedMeter, "speeds", lambda self, seen: SnapshotSpeeds(prefill_tokens_per_s=1.0))


class Place:
    """Where a test's snapshots are, and how its services are configured."""

    def __init__(self, model: Path, directory: Path, states: str = "device") -> None:
        self.model, self.directory, self.states = model, directory, states
        self.snapshots = directory / "snapshots"

    def config(self, n_groups: int = 2, *, slots: int = 2000, pages: int = 1200, on: bool = True) -> Path:
        groups = dict.fromkeys("abc"[:n_groups], 1)
        where = self.snapshots if on else ""
        extra = CONFIG.format(slots=slots, pages=pages, directory=where, min_tokens=MIN_TOKENS, states=self.states)
        path = write_config(self.directory, self.model, groups, ["0-1"] * n_groups, extra)
        text = path.read_text().replace(str(["0-1"] * n_groups).replace("'", '"'), f"[{SPLITS[n_groups]}]")
        path.write_text(text)
        return path

    def files(self) -> list[Path]:
        return sorted(self.snapshots.glob("*.safetensors"))


def snapshots_of(service: Service) -> SnapshotManager:
    assert service.snapshots is not None
    return service.snapshots


def told_of(service: Service) -> Counter[str]:
    """What the store counted."""
    now = snapshots_of(service).store.store.statistics
    return Counter(saved=now.n_saved, restored=now.n_restored, failed=sum(now.failures.values()))


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
        again = await converse(service, spec.vocabulary, n)
        counts = told_of(service)
        assert service.engine is not None
        tokens = service.engine.statistics().cache.tokens
        read_bytes = snapshots_of(service).meter.read_bytes
        assert 0 < read_bytes <= snapshots_of(service).store.store.statistics.restored_bytes
    assert off.answers == cold.answers == warm.answers == again.answers
    assert counts["failed"] == 0
    assert counts["restored"] > 0
    assert tokens["disk"] > 0
    assert tokens["memory"] + tokens["disk"] == sum(again.cached)
    # A state that is restored whole answers for itself with one token; so does one that is saved.
    n_asked = again.n_computed - (sum(again.prompts) - sum(again.cached) + len(again.answers) * (ANSWER - 1))
    assert 0 <= n_asked <= counts["restored"] + counts["saved"]
    for n_prompt, n_warm, n_again in zip(again.prompts, warm.cached, again.cached, strict=True):
        assert n_again > n_warm - MIN_TOKENS  # a file for fewer is not written
        assert n_again < n_prompt


@pytest.mark.parametrize(
    ("name", "states"), [("demo", "device"), ("qwen35", "device"), ("qwen35", "host"), ("gemma4_e2b", "device")]
)
async def test_off_cold_warm_and_after_a_restart_give_the_same_tokens(name: str, states: str, tmp_path: Path) -> None:
    await four_arms(Place(MODELS[name], tmp_path, states), 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
async def test_40_conversations_of_every_family_in_four_arms(name: str, tmp_path: Path) -> None:
    await four_arms(Place(MODELS[name], tmp_path), 40)


async def across_splits(place: Place, n: int) -> None:
    """Saved by three groups, used by two and by one with another number of pages."""
    vocabulary = open_spec(place.model).vocabulary
    async with running(place.config(3), place.directory) as service:
        cold = await converse_and_save(service, vocabulary, n)
        assert service.placement is not None
        ranges = [stage.layers for stage in service.placement.stages]
        assert len(ranges) == 3
    for n_groups, pages in ((2, 900), (1, 1500)):
        async with running(place.config(n_groups, pages=pages), place.directory) as service:
            told = await converse(service, vocabulary, n)
            assert told.answers == cold.answers
            assert told_of(service)["restored"] >= n
            assert told_of(service)["failed"] == 0
            assert told.n_computed < sum(told.prompts) / 2


@pytest.mark.parametrize("name", ["demo", "qwen35"])
async def test_saved_under_one_split_and_used_under_others(name: str, tmp_path: Path) -> None:
    await across_splits(Place(MODELS[name], tmp_path), 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("demo", "qwen35")])
async def test_saved_under_one_split_and_used_under_others_by_every_family(name: str, tmp_path: Path) -> None:
    await across_splits(Place(MODELS[name], tmp_path), 2)


# ---- when and what


async def test_the_log_says_why_a_slot_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeedMeter, "speeds", lambda self, seen: SnapshotSpeeds(prefill_tokens_per_s=1e12))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
    place = Place(MODELS["qwen35"], tmp_path)
    with structlog.testing.capture_logs() as said:
        async with running(place.config(), place.directory) as service:
            await ask(service, PROMPT, [])
            await until(lambda: any(line["event"] == "snapshot not worth a file" for line in said))
    [line, *_] = [line for line in said if line["event"] == "snapshot not worth a file"]
    assert line["log_level"] == "debug"
    assert "computing" in line["reason"]
    assert "reading them" in line["reason"]
    assert not place.files()


async def test_an_evicted_slot_goes_to_disk_and_comes_back(tmp_path: Path) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    prompts = [[first, *PROMPT] for first in range(4)]
    async with running(place.config(slots=1), place.directory) as service:
        assert service.engine is not None
        service.engine.prefixes.hooks.on_slot = lambda slot: None  # no turn is saved
        cold = [await ask(service, prompt, []) for prompt in prompts]
        await until(lambda: told_of(service)["saved"] > 0)
        saved = [tuple(e.snapshot.tokens) for e in snapshots_of(service).store.store.entries]
        warm = [await ask(service, prompt, []) for prompt in prompts]
    assert all(list(tokens[:301]) == prompts[tokens[0]][: len(tokens)] for tokens in saved)
    assert [tokens for tokens, _ in cold] == [tokens for tokens, _ in warm]
    assert sum(finished.usage.cached_tokens >= 256 for _, finished in warm) > 0


async def test_an_orderly_restart_of_a_group_loses_no_prefix(tmp_path: Path) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    async with running(place.config(), place.directory) as service:
        first, finished = await ask(service, PROMPT, [])
        assert finished.usage.cached_tokens == 0
        await service.restart("b", now=False)
        again, finished = await ask(service, PROMPT, [])
        assert finished.usage.cached_tokens > 200
        assert told_of(service)["restored"] == 1
    assert again == first


async def test_requests_that_want_the_same_file_wait_for_one_restore(tmp_path: Path) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    async with running(place.config(), place.directory) as service:
        expected, _ = await ask(service, PROMPT, [])
    async with running(place.config(), place.directory) as service:
        answers = await asyncio.gather(*(ask(service, PROMPT, []) for _ in range(6)))
        assert told_of(service)["restored"] == 1
    assert all(tokens == expected for tokens, _ in answers)
    assert all(finished.usage.cached_tokens > 200 for _, finished in answers)


async def test_a_stop_with_requests_still_saves_within_its_deadline(tmp_path: Path) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    async with running(place.config(), place.directory) as service:
        assert service.engine is not None
        service.engine.prefixes.hooks.on_slot = lambda slot: None
        await ask(service, PROMPT, [])
        assert not place.files()
        await service.stop()
    assert place.files()
    assert not list(place.snapshots.glob("*.partial"))


# ---- what must never give a wrong token


async def until(reached: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not reached():  # noqa: ASYNC110 - files and counters have no event
            await asyncio.sleep(0.02)


async def saved_prompt(place: Place) -> list[int]:
    """Save ``PROMPT`` and return the answer that belongs to it."""
    async with running(place.config(), place.directory) as service:
        expected, _ = await ask(service, PROMPT, [])
        await snapshots_of(service).save_all(60.0)
    assert place.files()
    return expected


def change_states(file: Path) -> None:
    """Write other numbers into every tensor, with checksums that fit: nothing but the model can tell."""
    fd, snapshot, _ = disk.open_snapshot(file)
    os.close(fd)
    data = bytearray(file.read_bytes())
    size = len(data) - snapshot.data_start
    half = size // 8 * 4
    body = data[snapshot.data_start :]
    data[snapshot.data_start :] = body[half:] + body[:half]
    file.write_bytes(data)
    with file.open("r+b") as opened:
        with ThreadPoolExecutor(1) as pool:
            sums = disk.checksums(opened.fileno(), snapshot.tensors, pool)
        opened.write(pack(replace(snapshot, checksums=sums)))


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


@pytest.mark.parametrize("damage", [change_states, flip_a_bit, cut])
async def test_a_file_that_is_not_what_was_saved_is_set_aside_and_the_prompt_computed(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    expected = await saved_prompt(place)
    for file in place.files():
        damage(file)
    async with running(place.config(), place.directory) as service:
        answer, finished = await ask(service, PROMPT, [])
        assert answer == expected
        assert finished.usage.cached_tokens == 0
        assert told_of(service)["restored"] == 0
        assert told_of(service)["failed"] >= 1
        again, finished = await ask(service, PROMPT, [])
        assert (again, finished.usage.cached_tokens > 200) == (expected, True)
        await until(lambda: told_of(service)["saved"] > 0)
    assert list(place.snapshots.glob("*.refused"))


@pytest.mark.parametrize("group", ["a", "b"])
async def test_a_daemon_killed_while_it_restores_costs_the_prefix_only(group: str, tmp_path: Path) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    expected = await saved_prompt(place)
    async with running(place.config(), place.directory) as service:
        kill_at(service, "restore", group)
        answer, finished = await ask(service, PROMPT, [])  # it was queued: it waits for the daemon
        assert answer == expected
        assert finished.usage.cached_tokens == 0
        assert snapshots_of(service).meter.read_bytes == 0  # what did not arrive says nothing of the disk
        answer, finished = await ask(service, [*PROMPT, *expected, 7], [])
        assert finished.usage.cached_tokens > 200
    assert place.files()


@pytest.mark.parametrize("group", ["a", "b"])
async def test_a_daemon_killed_while_it_saves_leaves_no_file_and_nothing_wrong(group: str, tmp_path: Path) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    async with running(place.config(), place.directory) as service:
        expected, _ = await ask(service, PROMPT, [])
        await until(lambda: told_of(service)["saved"] > 0)
        before = place.files()
        kill_at(service, "save", group)
        await ask(service, [9, *PROMPT], [])
        await until(lambda: told_of(service)["failed"] > 0)
        await until(lambda: service.state == "ready")
        assert not list(place.snapshots.glob("*.partial"))
        assert place.files() == before
        answer, finished = await ask(service, PROMPT, [])
        assert (answer, finished.usage.cached_tokens > 200) == (expected, True)


def kill_at(service: Service, what: str, group: str) -> None:
    """Kill a daemon at the moment the next transfer of a kind was sent."""
    shards = snapshots_of(service).shards
    begin = getattr(shards, what)

    def begin_and_kill(file: object, place: object) -> Awaitable[object]:
        setattr(shards, what, begin)
        pid = service.groups[group].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        ended: Awaitable[object] = begin(file, place)
        return ended

    setattr(shards, what, begin_and_kill)


def delay(service: Service, what: str, seconds: float) -> None:
    """Let the answers to the next transfers of a kind come late."""
    shards = snapshots_of(service).shards
    begin = getattr(shards, what)

    def begin_and_wait(file: object, place: object) -> Awaitable[object]:
        ended = begin(file, place)

        async def late() -> object:
            await asyncio.sleep(seconds)
            return await ended

        return asyncio.ensure_future(late())

    setattr(shards, what, begin_and_wait)


async def test_nobody_waits_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    expected = await saved_prompt(place)
    monkeypatch.setattr("lucevisor.snapshots.manager.TRANSFER_S", 0.3)
    async with running(place.config(), place.directory) as service:
        delay(service, "restore", 1.5)
        answer, finished = await ask(service, PROMPT, [])
        assert answer == expected
        assert finished.usage.cached_tokens == 0
        assert told_of(service) == Counter()  # the daemons are not through with it
        await until(lambda: told_of(service)["failed"] == 1)
        delay(service, "save", 1.5)
        before = place.files()
        await ask(service, [9, *PROMPT], [])
        await until(lambda: told_of(service)["failed"] == 2)
        assert place.files() == before
        assert service.engine is not None
        await until(lambda: not any(slot.pins for slot in service.engine.prefixes.slots))  # type: ignore[union-attr]
    assert not list(place.snapshots.glob("*.partial"))


async def test_a_hurried_stop_waits_for_no_file(tmp_path: Path) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    async with running(place.config(), place.directory) as service:
        assert service.engine is not None
        service.engine.prefixes.hooks.on_slot = lambda slot: None
        await ask(service, PROMPT, [])
        delay(service, "save", 30.0)
        first = asyncio.create_task(service.stop())
        await until(lambda: bool(list(place.snapshots.glob("*.partial"))))
        assert not first.done()
        async with asyncio.timeout(5.0):
            await service.stop(0.0, 1.0)
            await first
    assert not place.files()
    assert not list(place.snapshots.glob("*.partial"))


async def test_a_disk_that_hangs_holds_up_no_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    monkeypatch.setattr("lucevisor.deployment.service.SAVE_S", 0.5)
    async with running(place.config(), place.directory) as service:
        assert service.engine is not None
        service.engine.prefixes.hooks.on_slot = lambda slot: None
        await ask(service, PROMPT, [])
        delay(service, "save", 30.0)
        async with asyncio.timeout(8.0):
            await service.stop()
    assert not list(place.snapshots.iterdir()) or [p.name for p in place.snapshots.iterdir()] == ["lucevisor.lock"]
