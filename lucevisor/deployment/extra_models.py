"""Models beside the served one, in their daemons: the scoring model of PFlash, and the vision encoder.

Invariant: one message to each is unanswered at most, so steps of other stages of its daemon wait for one at most.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import structlog

from lucevisor import suspend_clock
from lucevisor.errors import ScoringError, VisionError
from lucevisor.model.vision import EncoderImage
from lucevisor.placement.result import PlacedEncoder, PlacedScorer
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import EncodeImage, ImageRows, ScoreWindow, WindowScores
from lucevisor.protocol.transport import Channel

ROW_NUMBER_BYTES: Final = 4
"""Rows of images are float32, whatever layers compute with."""
KEPT_BYTES: Final = 256 << 20
"""Rows of the images used last that are kept in host memory; those of requests that run are beside them."""
MAX_LOSSES: Final = 2
"""Times that an image is encoded again: it may be what ends its daemon."""

log = structlog.get_logger("lucevisor.deployment")
Placed = TypeVar("Placed", PlacedScorer, PlacedEncoder)


class _Lost(Exception):
    """There is no daemon, or it was lost with a message."""


class ModelClient(Generic[Placed]):
    """A model on the device where it is ``placed``; ``on_ready`` when its daemon has loaded it."""

    what = "model"

    def __init__(self, placed: Placed) -> None:
        self.placed: Placed = placed
        self.work_in_progress = ""  # of its daemon, for messages
        self._link: Channel | None = None
        self._loss = "its daemon is starting"
        self._ready = asyncio.Event()
        self._turn = asyncio.Lock()
        self._number = 0  # of the message that is unanswered
        self._answer: asyncio.Future[Frame] | None = None

    @property
    def attached(self) -> bool:
        return self._link is not None

    @property
    def unavailable_reason(self) -> str:
        """Return why the model cannot be used; empty when it can."""
        return "" if self.attached else self._loss

    def on_ready(self, group: str, link: Channel, problem: str) -> None:
        """Called when a daemon has loaded; with a ``problem``, without this model."""
        if group != self.placed.group:
            return
        if problem:
            self._detach(problem)
            return
        self._link = link
        self._ready.set()
        log.info(f"{self.what} attached", group=group, name=self.placed.name)

    def on_lost(self, group: str, reason: str) -> None:
        """Called when a daemon has exited or is about to."""
        if group == self.placed.group:
            self._detach(f"group {group}: {reason}")

    def _detach(self, reason: str) -> None:
        if self._link is not None:
            log.info(f"{self.what} detached", group=self.placed.group, reason=reason)
        self._link, self._loss, self._number, self.work_in_progress = None, reason, 0, ""
        self._ready.clear()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_Lost(reason))

    def _take(self, group: str, frame: Frame, number: int) -> bool:
        """Take an answer to message ``number``; return whether it is of this model's daemon."""
        if group != self.placed.group:
            return False
        answered, self._number, self.work_in_progress = self._number, 0, ""
        if answered == number and self._answer is not None and not self._answer.done():  # else sent before a loss
            self._answer.set_result(frame)
        return True

    async def _send(
        self, message: ScoreWindow | EncodeImage, number: int, work: str, payload: Sequence[bytes] = ()
    ) -> Frame:
        """Return the answer to a message.  Raises _Lost."""
        while self._answer is not None and not self._answer.done():  # of a cancelled request
            await asyncio.wait({self._answer})
        if self._link is None:
            raise _Lost(self._loss)
        self._answer = asyncio.get_running_loop().create_future()
        self._answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved in any case
        self._number, self.work_in_progress = number, work
        try:
            self._link.send(message, payload=payload)
        except ProtocolError as error:  # the link's on_closed tells supervision, which calls on_lost()
            self._detach(f"it cannot be reached: {error}")
        return await asyncio.shield(self._answer)


class ScorerClient(ModelClient[PlacedScorer]):
    """Scores windows of tokens.  Without its daemon that fails with a reason, and prompts stay whole."""

    what = "scoring model"

    def __init__(self, placed: PlacedScorer) -> None:
        super().__init__(placed)
        self._n_windows = 0

    def frame(self, group: str, frame: Frame) -> bool:
        """Take a frame of a daemon's link; return whether it was an answer of the scoring model."""
        return isinstance(frame.message, WindowScores) and self._take(group, frame, frame.message.window)

    async def score(self, tokens: Sequence[int], n_query: int) -> Sequence[float]:
        async with self._turn:
            self._n_windows += 1
            scores: Sequence[float] = ()
            for start, stop in _steps(len(tokens), self.placed.step_tokens, n_query):
                n_asking = n_query if stop == len(tokens) else 0
                scores = await self._score(ScoreWindow(self._n_windows, start, list(tokens[start:stop]), n_asking))
        return scores

    async def _score(self, message: ScoreWindow) -> Sequence[float]:
        try:
            frame = await self._send(message, message.window, f"window {message.window} at {message.start}")
        except _Lost as lost:
            raise ScoringError(f"the scoring model is unavailable: {lost}") from lost
        n_scores = message.start + len(message.tokens) if message.n_query else 0
        assert isinstance(frame.message, WindowScores)
        if frame.message.n_scores != n_scores or len(frame.payload) != 4 * n_scores:
            text = f"{frame.message.n_scores} scores in {len(frame.payload)} bytes for {n_scores} tokens"
            raise ScoringError(f"the scoring model answered with {text}")
        return frame.payload.cast("f").tolist() if n_scores else ()


def _steps(n: int, step_tokens: int, n_query: int) -> list[tuple[int, int]]:
    """Return ranges of at most ``step_tokens`` tokens that cover ``n``; the last has at least ``n_query``."""
    ends = list(range(step_tokens, n, step_tokens))
    if ends and n - ends[-1] < n_query:
        ends[-1] = n - n_query
    return list(zip([0, *ends], [*ends, n], strict=True))


class EncoderClient(ModelClient[PlacedEncoder]):
    """Encodes images, and keeps their embedding rows of ``row_bytes`` (an encoder cache).

    Without its daemon images wait for ``hold_s``, as requests do.
    """

    what = "vision encoder"

    def __init__(self, placed: PlacedEncoder, row_bytes: int, hold_s: float) -> None:
        super().__init__(placed)
        self._row_bytes, self._hold_s = row_bytes, hold_s
        self._kept: OrderedDict[tuple[int, ...], memoryview] = OrderedDict()
        self._kept_bytes = 0
        self.n_encoded = self.n_reused = 0  # images, since the start
        self.seconds = 0.0

    def frame(self, group: str, frame: Frame) -> bool:
        """Take a frame of a daemon's link; return whether it was an answer of the encoder."""
        return isinstance(frame.message, ImageRows) and self._take(group, frame, frame.message.image)

    async def encode(self, image: EncoderImage) -> memoryview:
        """Return the embedding rows of an image, encoding it again if its daemon is lost meanwhile.

        Raises VisionError.
        """
        async with self._turn:
            if (rows := self._kept.get(image.ids)) is not None:
                self._kept.move_to_end(image.ids)
                self.n_reused += 1
                return rows
            rows = await self._encode(image)
            self.n_encoded += 1
            if len(rows) != (expected := len(image.ids) * self._row_bytes):
                raise VisionError(f"the vision encoder answered with {len(rows)} bytes of rows, not {expected}")
            self._keep(image.ids, rows)
            return rows

    async def _encode(self, image: EncoderImage) -> memoryview:
        number, n_losses = self.n_encoded + 1, 0
        while True:
            await self._wait()
            try:
                frame = await self._send(EncodeImage(number, *image.size), number, f"image {number}", [image.pixels])
            except _Lost as lost:
                n_losses += 1
                if n_losses > MAX_LOSSES:
                    raise VisionError(f"{n_losses} daemons in a row were lost with this image: {lost}") from lost
                log.info("image is encoded again", reason=str(lost))
            else:
                assert isinstance(frame.message, ImageRows)
                self.seconds += frame.message.compute_s
                return frame.payload

    async def _wait(self) -> None:
        """Wait for the daemon, as long as requests are held for one."""
        if self._link is not None:
            return
        try:
            async with suspend_clock.timeout(self._hold_s):
                await self._ready.wait()
        except TimeoutError:
            raise VisionError(f"images cannot be read: {self._loss}") from None

    def _keep(self, ids: tuple[int, ...], rows: memoryview) -> None:
        self._kept[ids] = rows
        self._kept_bytes += len(rows)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped)
