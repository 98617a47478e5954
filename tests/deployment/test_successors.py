"""What a lost daemon's successor replays is prepared when it is lost, and given back if it will not be read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import cast

import pytest

from lucevisor.deployment.assembly import PipelineAssembly
from lucevisor.deployment.successors import Successors
from lucevisor.engine.recovery import StateReplay
from lucevisor.model.values import Dtype
from lucevisor.protocol.loading import Load, PoolSizes, StageReplay

LOAD = Load(["model.gguf"], Dtype.FLOAT32, Dtype.FLOAT32, [], [], PoolSizes(0, 0, 0), 1, 128)


class LostPipeline:
    """Has a replay for each group, which takes a moment to make."""

    complete = holding = False

    def __init__(self) -> None:
        self.n_busy = 0  # times that steps are on their way to other stages for too long
        self.files: list[tuple[int, int]] = []  # descriptors and inodes
        self.asked: list[str] = []
        self.lost_groups = frozenset({"a", "b"})  # a group without stages is never one

    async def replay(self, group: str, timeout_s: float) -> StateReplay | None:
        self.asked.append(group)
        await asyncio.sleep(0)
        if self.n_busy:
            self.n_busy -= 1
            return None
        fd = os.memfd_create(group)
        self.files.append((fd, os.fstat(fd).st_ino))
        return StateReplay([StageReplay(len(self.files), [])], fd)


def is_open(file: tuple[int, int]) -> bool:
    """Whether a descriptor is of that inode: numbers are used again."""
    try:
        return os.fstat(file[0]).st_ino == file[1]
    except OSError:
        return False


async def made(pipeline: LostPipeline, n: int) -> None:
    for _ in range(5 * n):
        await asyncio.sleep(0)
    assert len(pipeline.files) == n


def test_a_load_carries_what_was_prepared_when_the_daemon_was_lost() -> None:
    async def run() -> None:
        pipeline, successors = LostPipeline(), Successors([])
        assembly = cast(PipelineAssembly, pipeline)
        successors.lost("a", assembly)
        await made(pipeline, 1)
        order = await successors.order("a", LOAD, [], assembly)
        assert order.load.replay == [StageReplay(1, [])]
        assert [*order.fds] == [fd for fd, _ in pipeline.files]
        again = await successors.order("a", LOAD, [], assembly)  # the process died as it loaded
        assert again.load.replay == [StageReplay(2, [])]
        assert pipeline.asked == ["a", "a"]
        assert not is_open(pipeline.files[0])
        successors.close()
        assert not is_open(pipeline.files[1])

    asyncio.run(run())


def test_what_could_not_be_prepared_at_the_loss_is_prepared_for_the_load() -> None:
    async def run() -> None:
        pipeline, successors = LostPipeline(), Successors([])
        assembly, pipeline.n_busy = cast(PipelineAssembly, pipeline), 1
        successors.lost("a", assembly)
        await asyncio.sleep(0.01)
        assert (await successors.order("a", LOAD, [], assembly)).load.replay == [StageReplay(1, [])]
        assert pipeline.asked == ["a", "a"]
        successors.close()

    asyncio.run(run())


def test_the_loss_of_a_group_without_stages_changes_nothing() -> None:
    async def run() -> None:
        pipeline, successors = LostPipeline(), Successors([])
        assembly = cast(PipelineAssembly, pipeline)
        successors.lost("a", assembly)
        await made(pipeline, 1)
        successors.lost("drafter", assembly)
        assert is_open(pipeline.files[0])
        assert (await successors.order("a", LOAD, [], assembly)).load.replay == [StageReplay(1, [])]
        assert pipeline.asked == ["a"]
        successors.close()

    asyncio.run(run())


def test_a_process_that_dies_before_it_is_sent_its_load_leaves_nothing_open() -> None:
    async def run() -> None:
        pipeline, successors = LostPipeline(), Successors([])
        assembly = cast(PipelineAssembly, pipeline)
        successors.lost("a", assembly)
        order = asyncio.get_running_loop().create_task(successors.order("a", LOAD, [], assembly))
        for _ in range(5):
            if pipeline.files:
                break
            await asyncio.sleep(0)
        order.cancel()  # the replay is there, and the order has not gone on
        for _ in range(5):
            await asyncio.sleep(0)
        assert order.cancelled()
        assert not is_open(pipeline.files[0])
        successors.close()

    asyncio.run(run())


@pytest.mark.parametrize("wait", [0, 1])
@pytest.mark.parametrize(
    "end",
    [
        lambda successors, assembly: successors.lost("b", assembly),
        lambda successors, _: successors.drop("a"),
        lambda successors, _: successors.close(),
    ],
)
def test_what_nobody_will_read_is_given_back(wait: int, end: Callable[[Successors, PipelineAssembly], None]) -> None:
    """Whether it is there already or not."""

    async def run() -> None:
        pipeline, successors = LostPipeline(), Successors([])
        assembly = cast(PipelineAssembly, pipeline)
        successors.lost("a", assembly)
        await made(pipeline, wait)
        end(successors, assembly)
        for _ in range(5):
            await asyncio.sleep(0)
        successors.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not any(map(is_open, pipeline.files))

    asyncio.run(run())


def test_nothing_is_prepared_where_no_stage_is_lost() -> None:
    async def run() -> None:
        pipeline, successors = LostPipeline(), Successors([])
        pipeline.complete = True
        successors.lost("drafter", cast(PipelineAssembly, pipeline))
        successors.lost("drafter", None)
        order = await successors.order("drafter", LOAD, [], cast(PipelineAssembly, pipeline))
        assert order.load == LOAD
        assert not pipeline.asked

    asyncio.run(run())
