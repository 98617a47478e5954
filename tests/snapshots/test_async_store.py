"""The event loop never waits for the disk, and a cancelled call leaves nothing open."""

import asyncio
import gc
import os
import threading
import time

import pytest

from lucevisor.snapshots.async_store import AsyncSnapshotStore
from tests.snapshots.snapshot_parts import fill, made_slot, made_store, names


@pytest.fixture(autouse=True)
def every_descriptor_is_closed():
    gc.collect()  # what an earlier test left is not counted as ours
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_the_event_loop_never_waits(tmp_path):
    slow = threading.Event()

    def at(step):
        if step == "sync":
            slow.wait(0.3)

    background = AsyncSnapshotStore(made_store(tmp_path, at=at))
    writing = await background.begin(made_slot())
    n = fill(writing)
    longest, last = 0.0, time.monotonic()
    finishing = asyncio.create_task(background.finish(writing, n))
    while not finishing.done():
        await asyncio.sleep(0.005)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert longest < 0.15
    entry = await finishing
    reading = await background.open_for_restore(entry)
    await background.check(reading)
    background.store.close_snapshot(reading)
    await background.discard(entry, "wrong")
    assert await background.scan() == []
    background.close()


async def test_a_cancelled_call_closes_what_it_opened(tmp_path):
    reached, go_on = threading.Event(), threading.Event()

    def at(step):
        if step == "allocate":
            reached.set()
            go_on.wait(5)

    background = AsyncSnapshotStore(made_store(tmp_path, at=at))
    beginning = asyncio.create_task(background.begin(made_slot()))
    assert await asyncio.to_thread(reached.wait, 5)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    go_on.set()
    background.close()
    assert names(tmp_path) == []
