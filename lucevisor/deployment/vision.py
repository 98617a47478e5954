"""Vision stage and encoder cache: sends images to its daemon, and keeps their embedding rows.

Without its daemon images wait for it, as requests do.
Invariant: one message is unanswered at most, so steps of other stages of the daemon wait for one image at most.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

import structlog

from lucevisor import suspend_clock
from lucevisor.errors import VisionError
from lucevisor.model.vision import EncoderImage
from lucevisor.placement.result import PlacedEncoder
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import EncodeImage, ImageRows
from lucevisor.protocol.transport import Channel

log = structlog.get_logger("lucevisor.deployment")

ROW_NUMBER_BYTES: Final = 4
"""Rows are float32, whatever layers compute with."""
KEPT_BYTES: Final = 256 << 20
"""Rows of the images used last that are kept in host memory; those of requests that run are beside them."""


MAX_LOSSES: Final = 2
"""Times that an image is encoded again: it may be what ends its daemon."""


class _Lost(Exception):
    """The daemon was lost with an image."""


class VisionStage:
    """The vision encoder of a placement; ``on_ready`` when its daemon has loaded it.

    ``row_bytes``: of an embedding row; ``hold_s``: how long images wait for the daemon.
    """

    def __init__(self, placed: PlacedEncoder, row_bytes: int, hold_s: float) -> None:
        self.placed, self.row_bytes = placed, row_bytes
        self._hold_s = hold_s
        self._link: Channel | None = None
        self._unavailable_reason = "its daemon is starting"
        self._ready = asyncio.Event()
        self._turn = asyncio.Lock()
        self._kept: OrderedDict[tuple[int, ...], memoryview] = OrderedDict()
        self._kept_bytes = 0
        self._sent: EncodeImage | None = None
        self._answer: asyncio.Future[memoryview] | None = None
        self.n_encoded = self.n_reused = 0  # images, since the start
        self.seconds = 0.0

    @property
    def attached(self) -> bool:
        return self._link is not None

    @property
    def unavailable_reason(self) -> str:
        """Return why images cannot be encoded; empty when they can."""
        return "" if self.attached else self._unavailable_reason

    @property
    def work_in_progress(self) -> str:
        """Work of its daemon, for messages; empty: none."""
        return f"image {self._sent.image}" if self._sent is not None else ""

    def on_ready(self, group: str, link: Channel, problem: str) -> None:
        """Called when a daemon has loaded; with a ``problem``, without the encoder."""
        if group != self.placed.group:
            return
        if problem:
            self._detach(problem)
            return
        self._link = link
        self._ready.set()
        log.info("vision encoder attached", group=group, name=self.placed.name)

    def on_lost(self, group: str, reason: str) -> None:
        """Called when a daemon has exited or is about to."""
        if group == self.placed.group:
            self._detach(f"group {group}: {reason}")

    def _detach(self, reason: str) -> None:
        if self._link is not None:
            log.warning("vision encoder detached", group=self.placed.group, reason=reason)
        self._link, self._unavailable_reason, self._sent = None, reason, None
        self._ready.clear()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_Lost(reason))

    def frame(self, group: str, frame: Frame) -> bool:
        """Take a frame of a daemon's link; return whether it was an answer of the vision stage."""
        if group != self.placed.group or not isinstance(frame.message, ImageRows):
            return False
        sent, self._sent = self._sent, None
        if sent is None or sent.image != frame.message.image or self._answer is None or self._answer.done():
            return True  # sent before the daemon was lost
        self.seconds += frame.message.compute_s
        self._answer.set_result(frame.payload)
        return True

    async def encode(self, image: EncoderImage) -> memoryview:
        """Return the embedding rows of an image, encoding it again if its daemon is lost meanwhile.

        Raises VisionError.
        """
        async with self._turn:
            if (rows := self._kept.get(image.ids)) is not None:
                self._kept.move_to_end(image.ids)
                self.n_reused += 1
                return rows
            n_losses = 0
            while True:
                await self._wait()
                try:
                    rows = await self._send(image)
                    break
                except _Lost as lost:
                    n_losses += 1
                    if n_losses > MAX_LOSSES:
                        raise VisionError(f"{n_losses} daemons in a row were lost with this image: {lost}") from lost
                    log.info("image is encoded again", reason=str(lost))
            self.n_encoded += 1
            if len(rows) != (expected := len(image.ids) * self.row_bytes):
                raise VisionError(f"the vision encoder answered with {len(rows)} bytes of rows, not {expected}")
            self._keep(image.ids, rows)
            return rows

    async def _wait(self) -> None:
        """Wait for the daemon, as long as requests are held for one."""
        if self._link is not None:
            return
        try:
            async with suspend_clock.timeout(self._hold_s):
                await self._ready.wait()
        except TimeoutError:
            raise VisionError(f"images cannot be read: {self._unavailable_reason}") from None

    def _keep(self, ids: tuple[int, ...], rows: memoryview) -> None:
        self._kept[ids] = rows
        self._kept_bytes += len(rows)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped)

    async def _send(self, image: EncoderImage) -> memoryview:
        while self._answer is not None and not self._answer.done():  # of a cancelled request
            await asyncio.wait({self._answer})
        if self._link is None:
            raise _Lost(self._unavailable_reason)
        self._answer = asyncio.get_running_loop().create_future()
        self._answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved in any case
        self._sent = EncodeImage(self.n_encoded + 1, *image.size)
        try:
            self._link.send(self._sent, payload=[image.pixels])
        except ProtocolError as error:  # the link's on_closed tells supervision, which calls on_lost()
            self._detach(f"it cannot be reached: {error}")
        return await asyncio.shield(self._answer)
