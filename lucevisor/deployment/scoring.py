"""Scoring stage (PFlash): sends windows of tokens to its daemon and returns their scores.

Without its daemon scoring fails with a reason, and prompts stay whole.
Invariant: one message is unanswered at most, so steps of other stages of the daemon wait for one at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from lucevisor.errors import ScoringError
from lucevisor.placement.result import PlacedScorer
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import ScoreWindow, WindowScores
from lucevisor.protocol.transport import Channel

log = structlog.get_logger("lucevisor.deployment")


class ScoringStage:
    """The scoring model of a placement; ``on_ready`` when its daemon has loaded it."""

    def __init__(self, placed: PlacedScorer) -> None:
        self.placed = placed
        self._link: Channel | None = None
        self._unavailable_reason = "its daemon is starting"
        self._turn = asyncio.Lock()
        self._n_windows = 0
        self._sent: ScoreWindow | None = None
        self._answer: asyncio.Future[Sequence[float]] | None = None

    @property
    def window_tokens(self) -> int:
        return self.placed.window_tokens

    @property
    def attached(self) -> bool:
        return self._link is not None

    @property
    def unavailable_reason(self) -> str:
        """Return why windows cannot be scored; empty when they can."""
        return "" if self.attached else self._unavailable_reason

    @property
    def work_in_progress(self) -> str:
        """Work of its daemon, for messages; empty: none."""
        return f"window {self._sent.window} at {self._sent.start}" if self._sent is not None else ""

    def on_ready(self, group: str, link: Channel, problem: str) -> None:
        """Called when a daemon has loaded; with a ``problem``, without the scoring model."""
        if group != self.placed.group:
            return
        if problem:
            self._detach(problem)
            return
        self._link = link
        log.info("scoring model attached", group=self.placed.group, name=self.placed.name)

    def on_lost(self, group: str, reason: str) -> None:
        """Called when a daemon has exited or is about to."""
        if group == self.placed.group:
            self._detach(f"group {group}: {reason}")

    def _detach(self, reason: str) -> None:
        if self._link is not None:
            log.warning("scoring model detached", group=self.placed.group, reason=reason)
        self._link, self._unavailable_reason, self._sent = None, reason, None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ScoringError(f"the scoring model was lost: {reason}"))

    def frame(self, group: str, frame: Frame) -> bool:
        """Take a frame of a daemon's link; return whether it was an answer of the scoring stage."""
        if group != self.placed.group or not isinstance(frame.message, WindowScores):
            return False
        sent, self._sent = self._sent, None
        if sent is None or sent.window != frame.message.window or self._answer is None or self._answer.done():
            return True  # sent before the daemon was lost
        n_scores = sent.start + len(sent.tokens) if sent.n_query else 0
        if frame.message.n_scores != n_scores or len(frame.payload) != 4 * n_scores:
            text = f"{frame.message.n_scores} scores in {len(frame.payload)} bytes for {n_scores} tokens"
            self._answer.set_exception(ScoringError(f"the scoring model answered with {text}"))
        else:
            self._answer.set_result(frame.payload.cast("f").tolist() if n_scores else ())
        return True

    async def score(self, tokens: Sequence[int], n_query: int) -> Sequence[float]:
        """See :meth:`lucevisor.compression.windows.Scorer.score`."""
        async with self._turn:
            self._n_windows += 1
            scores: Sequence[float] = ()
            for start, stop in _steps(len(tokens), self.placed.step_tokens, n_query):
                n_asking = n_query if stop == len(tokens) else 0
                scores = await self._send(ScoreWindow(self._n_windows, start, list(tokens[start:stop]), n_asking))
        return scores

    async def _send(self, message: ScoreWindow) -> Sequence[float]:
        while self._answer is not None and not self._answer.done():  # of a cancelled request
            await asyncio.wait({self._answer})
        if self._link is None:
            raise ScoringError(f"the scoring model is unavailable: {self._unavailable_reason}")
        self._answer = asyncio.get_running_loop().create_future()
        self._answer.add_done_callback(lambda done: done.exception())  # retrieved even if its request was cancelled
        self._sent = message
        try:
            self._link.send(message)
        except ProtocolError as error:  # the link's on_closed tells supervision, which calls on_lost()
            self._sent, self._answer = None, None
            raise ScoringError(f"the scoring model cannot be reached: {error}") from error
        return await asyncio.shield(self._answer)


def _steps(n: int, step_tokens: int, n_query: int) -> list[tuple[int, int]]:
    """Return ranges of at most ``step_tokens`` tokens that cover ``n``; the last has at least ``n_query``."""
    ends = list(range(step_tokens, n, step_tokens))
    if ends and n - ends[-1] < n_query:
        ends[-1] = n - n_query
    return list(zip([0, *ends], [*ends, n], strict=True))
