"""Saves and restores between toy daemons and a memory of their own: test equipment for whatever moves prefix slots.

Nothing is copied before a test lets it be.  Like real transfers they end once each daemon has answered or is lost, and
fail if one was lost since they began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from lucevisor.model.values import Space
from lucevisor.protocol.messages import SlotPlace, SnapshotTensor
from lucevisor.snapshots.transfers import Transfer
from tests.engine.toy_drafter import ToyDrafter
from tests.engine.toy_engine import ToyEngine
from tests.engine.toy_pipeline import ToyDaemon, ToyStage, Violation

Page = list[tuple[int, int]]


@dataclass
class _Held:
    """What one stage wrote: its pages by space, its state, and what a drafter knows of that state."""

    pages: dict[Space, list[Page]]
    state: int
    after: tuple[int, int]


@dataclass
class _Pending:
    saves: bool
    fd: int
    with_draft: bool
    place: SlotPlace
    end: asyncio.Future[Transfer]
    links: list[ToyDaemon]
    drafter: ToyDrafter | None


class ToyTransfers:
    """``ShardTransfers`` over the daemons of a toy engine."""

    def __init__(self, toy: ToyEngine) -> None:
        self._toy = toy
        self._held: dict[tuple[int, int], _Held] = {}  # by file and stage
        self.pending: list[_Pending] = []
        self.n_saved = self.n_restored = 0

    def save(self, file: object, place: SlotPlace) -> asyncio.Future[Transfer]:
        return self._begin(file, place, saves=True)

    def restore(self, file: object, place: SlotPlace) -> asyncio.Future[Transfer]:
        return self._begin(file, place, saves=False)

    def do(self, index: int, problem: str = "") -> None:
        """Let one transfer end, as failed if there is a ``problem``."""
        one = self.pending.pop(index % len(self.pending))
        done = Transfer(0)
        alive = all(link in self._toy.daemons for link in one.links) and bool(one.links)
        done.problem = problem or ("" if alive else "group left was lost")
        if not done.problem:
            self._move(one, done)
        if not one.end.done():
            one.end.set_result(done)

    def _begin(self, file: object, place: SlotPlace, *, saves: bool) -> asyncio.Future[Transfer]:
        end = asyncio.get_running_loop().create_future()
        drafts: Sequence[SnapshotTensor] = file.draft_tensors()  # type: ignore[attr-defined]
        fd: int = file.fd  # type: ignore[attr-defined]
        links, drafter = list(self._toy.links), self._toy.drafter
        self.pending.append(_Pending(saves, fd, bool(drafts), place, end, links, drafter))
        return end

    def _move(self, one: _Pending, done: Transfer) -> None:
        stages = [link.stages[at] for at, link in enumerate(one.links)]
        if one.with_draft and one.drafter is not None and one.drafter is self._toy.drafter:
            stages.append(one.drafter)
        elif one.with_draft and one.saves:
            done.problem = "the drafter was lost"
            return
        elif one.with_draft:
            done.without["drafter"] = "it is away"
        self.n_saved += one.saves
        self.n_restored += not one.saves
        for stage in stages:
            key = one.fd, stage.stage
            if one.saves:
                self._held[key] = self._read(stage, one.place)
            elif key not in self._held:
                raise Violation(f"stage {stage.stage} reads a file that it has not written")
            else:
                self._write(stage, one.place, self._held[key])

    @staticmethod
    def _pages(stage: ToyStage, place: SlotPlace) -> dict[Space, list[Page]]:
        in_host = stage.host_pages
        full = [in_host[i] if i in in_host else stage.pages[Space.FULL][i] for i in place.full]
        window = [] if isinstance(stage, ToyDrafter) else [stage.pages[Space.WINDOW][i] for i in place.window]
        return {Space.FULL: full, Space.WINDOW: window}

    def _read(self, stage: ToyStage, place: SlotPlace) -> _Held:
        pages = {space: [list(page) for page in some] for space, some in self._pages(stage, place).items()}
        after = stage.after.get(place.state, (-1, -1)) if isinstance(stage, ToyDrafter) else (-1, -1)
        return _Held(pages, stage.states[place.state] if place.state >= 0 else 0, after)

    def _write(self, stage: ToyStage, place: SlotPlace, held: _Held) -> None:
        for space, pages in self._pages(stage, place).items():
            for page, bytes_ in zip(pages, held.pages[space], strict=True):
                page[:] = bytes_
        if place.state >= 0:
            stage.states[place.state] = held.state
            if isinstance(stage, ToyDrafter):
                stage.after[place.state] = held.after
