"""The journal's memory: rows come back bit for bit, whatever regions and blocks they went through."""

from __future__ import annotations

import numpy as np

from lucevisor.deployment.journal_rows import JournalRows
from lucevisor.engine.journal import RowCopy
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.loading import ArenaPlan

ROW_BYTES = 24


def test_rows_come_back_at_another_place_and_region() -> None:
    arena = Arena.create(ArenaPlan(boundary=1, region_bytes=100 * ROW_BYTES + 7, n_regions=3))
    rows = JournalRows({1: arena}, ROW_BYTES, 5 * 64 * ROW_BYTES + 1)
    assert rows.n_pages == 5
    written = np.random.default_rng(1).integers(0, 256, (100, ROW_BYTES), dtype=np.uint8)
    arena.region(2)[: written.nbytes] = written.tobytes()
    rows.file(1, 2, [RowCopy(4, 60, 0, 4), RowCopy(0, 0, 4, 64), RowCopy(3, 0, 68, 32)])
    rows.copy(0, 2, 10)
    arena.region(2)[:] = bytes(100 * ROW_BYTES + 7)
    rows.place(1, 0, [RowCopy(0, 0, 0, 64), RowCopy(3, 0, 64, 32), RowCopy(4, 60, 96, 4)])
    found = np.frombuffer(arena.region(0), dtype=np.uint8)[: written.nbytes].reshape(-1, ROW_BYTES)
    assert (found == np.concatenate([written[4:], written[:4]])).all()
    rows.place(1, 1, [RowCopy(2, 0, 0, 10)])
    copied = np.frombuffer(arena.region(1), dtype=np.uint8)[: 10 * ROW_BYTES].reshape(-1, ROW_BYTES)
    assert (copied == written[4:14]).all()
    del found, copied
    arena.close()
