"""A replay goes with the load of a lost group's next daemon, and its file is closed whatever becomes of that."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from io import FileIO
from typing import cast

import pytest

from lucevisor.deployment.assembly import PipelineAssembly, SuccessorState
from lucevisor.engine.shell import StateReplay
from lucevisor.model.values import Dtype
from lucevisor.protocol.loading import Load, PoolSizes, StageReplay

LOAD = Load(["model.gguf"], Dtype.FLOAT32, Dtype.FLOAT32, [], [], PoolSizes(0, 0, 0), 1, 128)


class LostPipeline:
    """Requests wait for group `lost`, whose next daemon is to replay a step."""

    complete, holding = False, True

    async def replay(self, group: str, _timeout_s: float) -> StateReplay | None:
        return StateReplay([StageReplay(0, [])], FileIO(os.memfd_create(group))) if group == "lost" else None


@pytest.mark.parametrize(
    "read_or_dropped",
    [
        lambda state: state.take("lost"),
        lambda state: state.drop("lost"),
        lambda state: state.close(),
        lambda state: asyncio.run(state.load_order("lost", LOAD, None)),
    ],
)
def test_a_replay_goes_with_the_load_and_its_file_is_closed(
    read_or_dropped: Callable[[SuccessorState], None],
) -> None:
    state, assembly = SuccessorState(), cast(PipelineAssembly, LostPipeline())
    order = asyncio.run(state.load_order("lost", LOAD, assembly))
    assert order.load.replay == [StageReplay(0, [])]
    assert not order.load.warm_up
    [file] = order.fds
    inode = os.fstat(file).st_ino
    read_or_dropped(state)
    with contextlib.suppress(OSError):
        assert os.fstat(file).st_ino != inode  # the number may be another file's by now
    other = asyncio.run(state.load_order("other", LOAD, assembly))
    assert (other.load.replay, other.load.warm_up, other.fds) == ([], False, ())
