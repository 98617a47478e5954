"""What must never give a wrong token or hold anybody up: damaged files, killed daemons, a disk that hangs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lucevisor.deployment.service import Service
from lucevisor.snapshots import disk
from tests.combinations import slow
from tests.e2e.service import MODELS, PROMPT, Place, ask, restore_always, running, snapshots_of, told_of
from tests.waiting import until


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A folder with ``PROMPT`` saved, and the answer that belongs to it."""

    async def save(place: Place) -> list[int]:
        async with running(place.config(), place.directory) as service:
            expected, _ = await ask(service, PROMPT, [])
            await snapshots_of(service).save_all(60.0)
        assert place.files()
        return expected

    place = Place(MODELS["qwen35"], tmp_path_factory.mktemp("saved"))
    return place.snapshots, asyncio.run(save(place))


@pytest.fixture
def place(saved: tuple[Path, list[int]], tmp_path: Path) -> Place:
    shutil.copytree(saved[0], tmp_path / "snapshots")
    return Place(MODELS["qwen35"], tmp_path)


@pytest.fixture
def expected(saved: tuple[Path, list[int]]) -> list[int]:
    return saved[1]


def flip_in_each_tensor(file: Path) -> None:
    fd, snapshot, _ = disk.open_snapshot(file)
    os.close(fd)
    for tensor in snapshot.tensors:
        flip(file, tensor.offset + tensor.n_bytes // 2)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


async def test_a_file_that_is_damaged_while_a_supervisor_knows_it_is_set_aside_and_the_prompt_computed(
    place: Place, expected: list[int]
) -> None:
    async with running(place.config(), place.directory) as service:
        await until(lambda: len(snapshots_of(service).store.entries) == len(place.files()))
        for file in place.files():
            flip_in_each_tensor(file)
        pids = {name: group.pid for name, group in service.groups.items()}
        answer, finished = await ask(service, PROMPT, [])
        assert (answer, finished.usage.cached_tokens) == (expected, 0)
        assert told_of(service)["failed"] >= 1
        assert {name: group.pid for name, group in service.groups.items()} == pids
    assert list(place.snapshots.glob("*.refused"))


async def test_a_daemon_killed_while_it_restores_costs_the_prefix_only(place: Place, expected: list[int]) -> None:
    async with running(place.config(), place.directory) as service:
        kill_at(service, "load", "a")
        answer, finished = await ask(service, PROMPT, [])  # it was queued: it waits for the daemon
        assert answer == expected
        assert finished.usage.cached_tokens == 0
        answer, finished = await ask(service, [*PROMPT, *expected, 7], [])
        assert finished.usage.cached_tokens > 200
    assert place.files()


async def test_a_daemon_killed_while_it_saves_leaves_no_file_and_nothing_wrong(tmp_path: Path) -> None:
    place = Place(MODELS["qwen35"], tmp_path)
    async with running(place.config(), place.directory) as service:
        expected, _ = await ask(service, PROMPT, [])
        await until(lambda: told_of(service)["saved"] > 0)
        before = place.files()
        kill_at(service, "save", "b")
        await ask(service, [9, *PROMPT], [])
        await until(lambda: told_of(service)["failed"] > 0)
        await until(lambda: service.state == "ready")
        # The request is computed again and its slot may be saved then; nothing else has a file.
        await until(lambda: len(place.files()) == told_of(service)["saved"])
        await until(lambda: not list(place.snapshots.glob("*.partial")))
        assert set(before) <= set(place.files())
        answer, finished = await ask(service, PROMPT, [])
        assert (answer, finished.usage.cached_tokens > 200) == (expected, True)


@pytest.mark.parametrize("on", [True, slow(False)])
async def test_a_conversation_that_rests_while_a_daemon_is_lost_comes_back_when_it_is_asked_for(
    on: bool, tmp_path: Path
) -> None:
    """From its file, if it has one; else it is computed again."""
    place = Place(MODELS["qwen35"], tmp_path)
    async with running(place.config(on=on), place.directory) as service:
        restore_always(service)
        expected, _ = await ask(service, PROMPT, [])
        other, _ = await ask(service, [9, *PROMPT], [])
        if on:
            await snapshots_of(service).save_all(60.0)
        asking = asyncio.create_task(ask(service, [9, *PROMPT], []))
        await until(lambda: service.only.engine.statistics().running > 0 or asking.done())
        os.kill(service.groups["b"].pid or 0, signal.SIGKILL)
        assert (await asking)[0] == other
        await until(lambda: service.state == "ready" and service.only.engine.ready)
        answer, finished = await ask(service, PROMPT, [])
        assert (answer, finished.usage.cached_tokens > 200) == (expected, on)
        assert not on or told_of(service)["restored"] > 0
        again, finished = await ask(service, PROMPT, [])
        assert (again, finished.usage.cached_tokens > 200) == (expected, True)


def kill_at(service: Service, what: str, group: str) -> None:
    """Kill a daemon at the moment the next transfer of a kind was sent."""
    transfers = service.only.deployment.transfers
    assert transfers is not None
    begin = getattr(transfers, what)

    def begin_and_kill(units: object) -> Awaitable[object]:
        setattr(transfers, what, begin)
        pid = service.groups[group].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        ended: Awaitable[object] = begin(units)
        return ended

    setattr(transfers, what, begin_and_kill)


def delay(service: Service, what: str, wait: Callable[[], Awaitable[object]]) -> None:
    """Let the answers to transfers of a kind come late."""
    transfers = service.only.deployment.transfers
    assert transfers is not None
    begin = getattr(transfers, what)

    def begin_and_wait(units: object) -> Awaitable[object]:
        ended = begin(units)

        async def late() -> object:
            await wait()
            return await ended

        return asyncio.ensure_future(late())

    setattr(transfers, what, begin_and_wait)


async def test_nobody_waits_for_a_disk_that_hangs(
    place: Place, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(place.config(), place.directory) as service:
        monkeypatch.setattr("lucevisor.snapshots.manager.TRANSFER_S", 0.3)
        over = asyncio.Event()
        delay(service, "load", over.wait)
        answer, finished = await ask(service, PROMPT, [])
        assert answer == expected
        assert finished.usage.cached_tokens == 0
        assert told_of(service) == Counter()  # the daemons are not through with it
        over.set()
        await until(lambda: told_of(service)["failed"] == 1)
        delay(service, "save", lambda: asyncio.sleep(1.0))
        before = place.files()
        await ask(service, [9, *PROMPT], [])
        await until(lambda: told_of(service)["failed"] == 2)
        assert place.files() == before
        assert service.only.engine is not None
        await until(lambda: not any(slot.pins for slot in service.only.engine.prefixes.slots))  # type: ignore[union-attr]
    assert not list(place.snapshots.glob("*.partial"))
