"""Windows on their way to the scoring stage: in small messages, one unanswered at a time; its loss fails them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import pytest

from lucevisor.config import DeviceRef
from lucevisor.deployment.extra_models import ScorerClient
from lucevisor.errors import ScoringError
from lucevisor.model.values import Backend
from lucevisor.placement.result import PlacedScorer
from lucevisor.protocol.errors import LinkClosed
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import MessageKind, ScoreWindow, WindowScores


class Daemon:
    """The other end of a link: scores each token with its id, and answers when told to."""

    def __init__(self, stage: ScorerClient) -> None:
        self.stage, self.inbox, self.window, self.alive = stage, list[ScoreWindow](), list[int](), True

    def send(self, message: ScoreWindow, payload: Sequence[bytes] = ()) -> None:
        if not self.alive:
            raise LinkClosed("end of file", "link", "the daemon has exited; see its log")
        assert not self.inbox, "one message is unanswered at most"
        self.inbox.append(message)

    def answer(self, scores: list[float] | None = None) -> None:
        message = self.inbox.pop()
        self.window = [*(self.window if message.start else []), *message.tokens]
        assert message.start + len(message.tokens) == len(self.window)
        found = array("f", map(float, self.window) if scores is None else scores) if message.n_query else array("f")
        answer = WindowScores(message.window, len(found))
        assert self.stage.frame(
            "left", Frame(MessageKind.WINDOW_SCORES, 0, 0, answer, memoryview(bytearray(found.tobytes())))
        )


def made(step_tokens: int = 100) -> tuple[ScorerClient, Daemon]:
    stage = ScorerClient(PlacedScorer(DeviceRef("left", 0), Backend.CPU, "scorer", 1000, step_tokens))
    daemon = Daemon(stage)
    stage.on_ready("left", daemon, "")  # type: ignore[arg-type]  # a link, to the extent that is used
    return stage, daemon


async def begun(stage: ScorerClient, tokens: list[int], n_query: int = 8) -> asyncio.Task:
    task = asyncio.create_task(stage.score(tokens, n_query))
    await asyncio.sleep(0)
    return task


async def test_a_lost_daemon_fails_what_waits_and_a_new_one_goes_on() -> None:
    stage, daemon = made()
    tasks = [await begun(stage, [1] * 50), await begun(stage, [2] * 50)]
    stage.on_lost("right", "another group")
    assert stage.attached
    stage.on_lost("left", "killed by signal 9")
    for task in tasks:
        with pytest.raises(ScoringError, match="killed by signal 9"):
            await task
    assert not stage.attached
    assert stage.work_in_progress == ""
    assert "killed" in stage.unavailable_reason
    stage.on_ready("left", daemon, "")  # type: ignore[arg-type]
    daemon.inbox.clear()
    task = await begun(stage, [3] * 50)
    daemon.answer()
    assert await task == [3.0] * 50


async def test_a_window_waits_for_the_answer_of_one_whose_request_is_gone() -> None:
    stage, daemon = made()
    gone = await begun(stage, [1] * 250)
    gone.cancel()
    await asyncio.sleep(0)
    task = await begun(stage, [2] * 50)
    assert [message.window for message in daemon.inbox] == [1]
    assert stage.work_in_progress == "window 1 at 0"
    daemon.answer()
    for _ in range(20):
        await asyncio.sleep(0)
    assert [message.window for message in daemon.inbox] == [2]
    daemon.answer()
    assert await task == [2.0] * 50


async def test_scores_that_do_not_fit_the_window_are_an_error() -> None:
    stage, daemon = made()
    task = await begun(stage, [1] * 50)
    daemon.answer([1.0])
    with pytest.raises(ScoringError, match="1 scores in 4 bytes for 50 tokens"):
        await task
