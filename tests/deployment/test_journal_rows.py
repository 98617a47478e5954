"""The journal's memory: rows come back bit for bit, whatever regions and blocks they went through."""

from __future__ import annotations

import fcntl
import gc
import time
from types import SimpleNamespace

import numpy as np
import pytest

from lucevisor.deployment.boundaries import JournalRows, journal_rows
from lucevisor.engine.journal import RowCopy
from lucevisor.kv_transfer.host_memory import HostMemory
from lucevisor.placement.result import HostOwner
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.loading import ArenaPlan
from lucevisor.protocol.steps import Step

ROW_BYTES = 24


def test_rows_come_back_at_another_place_and_region() -> None:
    arena = Arena.create(ArenaPlan(boundary=1, region_bytes=100 * ROW_BYTES + 7, n_regions=3))
    memory = HostMemory()
    rows = JournalRows({1: arena}, ROW_BYTES, 5 * 64 * ROW_BYTES + 1, memory)
    assert (rows.n_pages, memory.used(HostOwner.JOURNAL)) == (5, 0)
    written = np.random.default_rng(1).integers(0, 256, (100, ROW_BYTES), dtype=np.uint8)
    arena.region(2)[: written.nbytes] = written.tobytes()
    rows.file(1, 2, [RowCopy(4, 60, 0, 4), RowCopy(0, 0, 4, 64), RowCopy(3, 0, 68, 32)])
    rows.copy(0, 2, 10)
    assert memory.used(HostOwner.JOURNAL) == 5 * 64 * ROW_BYTES
    arena.region(2)[:] = bytes(100 * ROW_BYTES + 7)
    rows.place(1, Step(7, 0), [RowCopy(0, 0, 0, 64), RowCopy(3, 0, 64, 32), RowCopy(4, 60, 96, 4)])
    found = np.frombuffer(arena.region(0), dtype=np.uint8)[: written.nbytes].reshape(-1, ROW_BYTES)
    assert (found == np.concatenate([written[4:], written[:4]])).all()
    assert arena.rung(0, 7)
    rows.place(1, Step(8, 1), [RowCopy(2, 0, 0, 10)])
    copied = np.frombuffer(arena.region(1), dtype=np.uint8)[: 10 * ROW_BYTES].reshape(-1, ROW_BYTES)
    assert (copied == written[4:14]).all()
    del found, copied, rows
    gc.collect()
    assert memory.used(HostOwner.JOURNAL) == 0, "another journal counts by itself"
    arena.close()


def test_rows_of_steps_are_gathered_in_a_file() -> None:
    row_bytes = 64 * 1024
    arena = Arena.create(ArenaPlan(boundary=0, region_bytes=64 * row_bytes, n_regions=1))
    memory = HostMemory()
    rows = JournalRows({0: arena}, row_bytes, 3 * 64 * row_bytes, memory)
    numbers = np.arange(64, dtype=np.uint8).repeat(row_bytes)
    arena.region(0)[:] = numbers.tobytes()
    rows.file(0, 0, [RowCopy(1, 0, 0, 64)])
    rows.file(0, 0, [RowCopy(2, 5, 9, 2)])
    with rows.gather([[RowCopy(1, 3, 0, 2), RowCopy(2, 5, 2, 2)], [], [RowCopy(1, 60, 0, 1)]]) as file:
        assert memory.used(HostOwner.REPLAYS) == 5 * row_bytes
        while not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_GROW:
            time.sleep(0.001)
        file.seek(0)
        found = np.frombuffer(file.read(), dtype=np.uint8).reshape(-1, row_bytes)
    assert found[:, 0].tolist() == [3, 4, 9, 10, 60]
    assert (found == found[:, :1]).all()
    arena.close()


@pytest.mark.usefixtures("no_thread_begins")
def test_where_no_thread_begins_there_is_no_journal() -> None:
    arena = Arena.create(ArenaPlan(boundary=0, region_bytes=64 * ROW_BYTES, n_regions=1))
    placed = SimpleNamespace(journal_bytes=3 * 64 * ROW_BYTES, max_step_tokens=64)
    assert journal_rows({(False, 0): arena}, placed, HostMemory()) is None  # type: ignore[arg-type]
    arena.close()
