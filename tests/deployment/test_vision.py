"""Images on their way to the vision stage: one unanswered at a time, remembered, and encoded again after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lucevisor.config import DeviceRef
from lucevisor.deployment import extra_models
from lucevisor.deployment.extra_models import EncoderClient
from lucevisor.errors import VisionError
from lucevisor.model.values import Backend
from lucevisor.model.vision import IMAGE_ID, EncoderImage, ImageGrid, ImageSize
from lucevisor.placement.result import PlacedEncoder
from lucevisor.protocol.errors import LinkClosed
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import EncodeImage, ImageRows, MessageKind

ROW_BYTES = 8


class Daemon:
    """The other end of a link: a row repeats the first byte of the image, and comes when told to."""

    def __init__(self, stage: EncoderClient) -> None:
        self.stage, self.inbox, self.alive = stage, list[tuple[EncodeImage, bytes]](), True

    def send(self, message: EncodeImage, payload: Sequence[bytes] = ()) -> None:
        if not self.alive:
            raise LinkClosed("end of file", "link", "the daemon has exited; see its log")
        assert not self.inbox, "one message is unanswered at most"
        self.inbox.append((message, payload[0]))

    def answer(self, n_rows: int | None = None) -> None:
        message, pixels = self.inbox.pop()
        n = message.width * message.height if n_rows is None else n_rows
        rows = memoryview(pixels[:1] * (ROW_BYTES * n))
        assert self.stage.frame("left", Frame(MessageKind.IMAGE_ROWS, 0, 0, ImageRows(message.image, n, 0.5), rows))


def image(number: int) -> EncoderImage:
    ids = tuple(range(IMAGE_ID + 12 * number, IMAGE_ID + 12 * number + 12))
    return EncoderImage(ImageSize(3, 4), ImageGrid(4, 3), bytes([number]) * 36, ids)


def made(hold_s: float = 5.0) -> tuple[EncoderClient, Daemon]:
    stage = EncoderClient(PlacedEncoder(DeviceRef("left", 0), Backend.CPU, "encoder", 8, 100), ROW_BYTES, hold_s)
    return stage, Daemon(stage)


def ready(stage: EncoderClient, daemon: Daemon, problem: str = "") -> None:
    stage.on_ready("left", daemon, problem)  # type: ignore[arg-type]  # a link, to the extent that is used


async def turns() -> None:
    """Let everybody do what there is to do now; none of it takes as many turns of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def begun(stage: EncoderClient, number: int) -> asyncio.Task[memoryview]:
    task = asyncio.create_task(stage.encode(image(number)))
    await turns()
    return task


async def test_images_wait_for_each_other_and_are_encoded_once() -> None:
    stage, daemon = made()
    ready(stage, daemon)
    tasks = [await begun(stage, number) for number in (1, 2, 1)]
    assert stage.work_in_progress == "image 1"
    for _ in range(2):
        daemon.answer()
        await turns()
    assert [bytes(await task) for task in tasks] == [bytes([n]) * 96 for n in (1, 2, 1)]
    assert (stage.n_encoded, stage.n_reused, stage.seconds) == (2, 1, 1.0)
    assert stage.work_in_progress == ""


async def test_the_images_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra_models, "KEPT_BYTES", 200)
    stage, daemon = made()
    ready(stage, daemon)
    for number, encodes in ((1, True), (2, True), (1, False), (3, True), (2, True), (3, False)):
        task = await begun(stage, number)
        assert bool(daemon.inbox) == encodes
        if encodes:
            daemon.answer()
        await task


async def test_an_image_is_encoded_again_by_the_next_daemon() -> None:
    stage, daemon = made()
    task = await begun(stage, 1)
    assert not daemon.inbox
    ready(stage, daemon)
    await turns()
    stage.on_lost("right", "another group")
    assert len(daemon.inbox) == 1
    stage.on_lost("left", "killed by signal 9")
    assert "killed" in stage.unavailable_reason
    lost = daemon.inbox.pop()
    await turns()
    ready(stage, daemon)
    await turns()
    assert daemon.inbox == [lost]
    daemon.answer()
    assert bytes(await task) == b"\1" * 96


async def test_an_image_that_ends_daemons_is_given_up() -> None:
    stage, daemon = made()
    ready(stage, daemon)
    task = await begun(stage, 1)
    for _ in range(1 + extra_models.MAX_LOSSES):
        daemon.inbox.clear()
        stage.on_lost("left", "killed by signal 9")
        ready(stage, daemon)
        await turns()
    with pytest.raises(VisionError, match="3 daemons in a row were lost with this image: group left: killed"):
        await task


@pytest.mark.parametrize("problem", ["", "the vision encoder cannot be loaded: memory"])
async def test_images_wait_as_long_as_requests_are_held(problem: str) -> None:
    stage, daemon = made(hold_s=0.01)
    if problem:
        ready(stage, daemon, problem)
    with pytest.raises(VisionError, match=problem or "its daemon is starting"):
        await stage.encode(image(1))


async def test_a_link_that_is_dead_counts_as_a_loss() -> None:
    stage, daemon = made(hold_s=0.01)
    ready(stage, daemon)
    daemon.alive = False
    with pytest.raises(VisionError, match="cannot be reached"):
        await stage.encode(image(1))


async def test_rows_of_another_size_are_refused() -> None:
    stage, daemon = made()
    ready(stage, daemon)
    task = await begun(stage, 1)
    daemon.answer(11)
    with pytest.raises(VisionError, match="88 bytes of rows, not 96"):
        await task


async def test_a_cancelled_request_leaves_the_stage_usable() -> None:
    stage, daemon = made()
    ready(stage, daemon)
    task = await begun(stage, 1)
    task.cancel()
    other = await begun(stage, 2)
    assert len(daemon.inbox) == 1
    daemon.answer()
    await turns()
    daemon.answer()
    assert bytes(await other) == b"\2" * 96
