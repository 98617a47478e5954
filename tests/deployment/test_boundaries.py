"""Who connects to whom, and whose rows are taken, when boundaries share no memory."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import cast

import pytest

from lucevisor.deployment.boundaries import Boundaries
from lucevisor.kv_transfer.host_memory import HostMemory
from lucevisor.placement.result import Placement
from lucevisor.protocol.loading import ArenaPlan, RowsConnection
from lucevisor.protocol.steps import PlacedRows, RowsCopy
from lucevisor.protocol.transport import Channel

PLANS = [ArenaPlan(0, 4096, 4), ArenaPlan(1, 4096, 4), ArenaPlan(2, 4096, 4, tokens=True)]
STAGES = [SimpleNamespace(group=name) for name in "abc"]
PLACEMENT = cast(Placement, SimpleNamespace(arenas=PLANS, stages=STAGES, arena_bytes=1, draft=None, journal_bytes=1))


class Sent:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.max_queued_bytes, self.sent = 0, list[tuple[object, bytes]]()

    def send(self, message: object, *, payload: list[bytes]) -> None:
        self.sent.append((message, payload[0]))


@pytest.fixture
def boundaries():  # type: ignore[no-untyped-def]
    made = Boundaries(PLACEMENT, {"c"}, HostMemory())
    yield made
    made.close()


def test_only_boundaries_of_remote_groups_are_connected_and_the_later_one_connects(boundaries: Boundaries) -> None:
    opened, fds = boundaries.open("a", [PLANS[0], PLANS[2]], "a:1")
    assert [plan.connection for plan in opened] == [None, RowsConnection(1)]
    assert [os.fstat(fd).st_size > 0 for fd in fds] == [True, False]  # the memory of the first, and its eventfd
    opened, _ = boundaries.open("b", PLANS[:2], "b:1")
    assert [plan.connection for plan in opened] == [None, RowsConnection(2)]
    opened, fds = boundaries.open("c", PLANS[1:], "c:1")
    assert [plan.connection for plan in opened] == [RowsConnection(3, "b:1"), RowsConnection(3, "a:1")]
    assert fds == []
    opened, _ = boundaries.open("b", PLANS[:2], "b:2")  # its next daemon
    assert opened[1].connection == RowsConnection(4, "c:1")


def test_without_a_journal_no_daemon_sends_copies() -> None:
    placement = SimpleNamespace(arenas=PLANS, stages=STAGES, arena_bytes=1, draft=None, journal_bytes=0)
    made = Boundaries(cast(Placement, placement), {"c"}, HostMemory())
    opened, _ = made.open("c", PLANS[1:], "c:1")
    assert [plan.connection for plan in opened] == [RowsConnection(1, "", copies=False)] * 2
    made.close()


def test_rows_are_taken_of_the_writer_alone_and_handed_on_when_it_is_lost(boundaries: Boundaries) -> None:
    reader = Sent()
    for group, own in {"a": [0, 2], "b": [0, 1], "c": [1, 2]}.items():
        boundaries.open(group, [PLANS[i] for i in own], f"{group}:1")
        boundaries.on_ready(group, cast(Channel, reader))
    rows, payload = RowsCopy(False, 1, 2, 7, 2, 0), memoryview(b"rows of step 7")
    assert "does not write" in boundaries.rows_arrived("c", rows, payload)
    assert "does not write" in boundaries.rows_arrived("a", RowsCopy(False, 0, 2, 7, 1, 0), payload)
    assert "of epoch 9" in boundaries.rows_arrived("b", RowsCopy(False, 1, 2, 7, 9, 0), payload)
    assert boundaries.rows_arrived("b", rows, payload) == ""
    assert boundaries.buffers[False, 1].rung(2, 7)
    boundaries.step_answered("b")
    boundaries.on_lost("b")
    assert reader.sent == [(PlacedRows(False, 1, 2, 7, 3, 0), b"rows of step 7")]
    boundaries.on_lost("c")
    boundaries.on_lost("b")
    assert len(reader.sent) == 1
