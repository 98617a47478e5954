"""The event loop never waits for the disk, and a cancelled call leaves nothing open."""

import asyncio
import gc
import os
import threading

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
    reached, go_on, held = threading.Event(), threading.Event(), []

    def at(step):
        if step == "sync":
            reached.set()
            held.append(go_on.wait(20))

    background = AsyncSnapshotStore(made_store(tmp_path, at=at))
    writing = await background.begin(made_slot())
    n = fill(writing)
    finishing = asyncio.create_task(background.finish(writing, n))
    assert await asyncio.to_thread(reached.wait, 20)
    assert not finishing.done()
    go_on.set()
    entry = await finishing
    assert held
    assert all(held)  # the loop ran on while the disk was busy, and let it go on
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
            go_on.wait(20)

    background = AsyncSnapshotStore(made_store(tmp_path, at=at))
    beginning = asyncio.create_task(background.begin(made_slot()))
    assert await asyncio.to_thread(reached.wait, 20)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    go_on.set()
    background.close()
    assert names(tmp_path) == []
