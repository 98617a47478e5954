"""Saves and restores over the links of all groups: one file, a message to every daemon, one outcome.

Knows links and descriptors; decides nothing about slots.  Invariant: every transfer that was started ends, once each
daemon has answered or is lost; until then it owns its pages and descriptor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from lucevisor.model.values import LayerRange
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import Restore, Restored, Save, Saved, SlotPlace, SnapshotTensor, TransferFailed
from lucevisor.protocol.transport import Link
from lucevisor.snapshots.transfers import Transfer, TransferKind, TransferTable


class TransferFile(Protocol):
    """A file that daemons write (:class:`PendingSnapshot`) or read (:class:`OpenSnapshot`)."""

    fd: int

    @property
    def file(self) -> str: ...

    def tensors(self, layers: LayerRange) -> list[SnapshotTensor]: ...

    def draft_tensors(self) -> list[SnapshotTensor]: ...

    def n_bytes(self, tensors: Sequence[SnapshotTensor]) -> int: ...


class ShardTransfers:
    """``layers[g]``: the layer ranges of group g.  ``draft_group``: the group that runs the draft stage, or empty."""

    def __init__(self, layers: Mapping[str, Sequence[LayerRange]], draft_group: str = "") -> None:
        self._layers = {group: tuple(ranges) for group, ranges in layers.items()}
        self._draft_group = draft_group
        self._links: dict[str, Link] = {}
        self._transfers = TransferTable()
        self._ends: dict[int, asyncio.Future[Transfer]] = {}
        self._refusing = ""  # why no snapshot is saved or restored

    def ready(self, group: str, link: Link) -> None:
        """A daemon finished loading."""
        self._links[group] = link
        self._refusing = ""

    async def quiesce(self, reason: str) -> None:
        """Refuse snapshots until ``resume`` or a daemon is ready, and wait for those in progress: their daemons write
        pages."""
        self._refusing = reason
        while self._ends:
            await asyncio.wait([*self._ends.values()])

    def resume(self) -> None:
        """Take snapshots again."""
        self._refusing = ""

    def lost(self, group: str, reason: str) -> None:
        """A daemon is lost, or about to be: it will not answer."""
        self._links.pop(group, None)
        for transfer in self._transfers.lost(group, reason):
            self._end(transfer)

    def frame(self, group: str, frame: Frame) -> bool:
        """Handle a daemon's answer; False if the frame does not belong to a transfer."""
        match frame.message:
            case Saved() as saved:
                self._end(self._transfers.answered(group, saved.transfer, saved.n_bytes))
            case Restored() as restored:
                done = self._transfers.answered(group, restored.transfer, restored.n_bytes, restored.converted)
                self._end(done)
            case TransferFailed() as failed:
                reason = f"group {group}, {failed.where}: {failed.reason}"
                self._end(self._transfers.failed(group, failed.transfer, reason))
            case _:
                return False
        return True

    def save(
        self, file: TransferFile, place: SlotPlace, groups: Collection[str] | None = None
    ) -> asyncio.Future[Transfer]:
        """Let every daemon, or those of ``groups``, write its tensors; the future completes when all are done with the
        file.
        """
        return self._begin(TransferKind.SAVE, Save, file, place, groups)

    def restore(
        self, file: TransferFile, place: SlotPlace, groups: Collection[str] | None = None
    ) -> asyncio.Future[Transfer]:
        """Let every daemon, or those of ``groups``, read its tensors; the future completes when all are done with the
        file.

        A daemon that runs the drafter alone may fail or be away: ``Transfer.without`` then names its group.
        """
        return self._begin(TransferKind.RESTORE, Restore, file, place, groups)

    def _begin(
        self,
        kind: TransferKind,
        message: type[Save | Restore],
        file: TransferFile,
        place: SlotPlace,
        groups: Collection[str] | None,
    ) -> asyncio.Future[Transfer]:
        tensors = {group: own for group, own in self._tensors(file).items() if groups is None or group in groups}
        n_bytes = {group: file.n_bytes(own) for group, own in tensors.items()}
        optional = {self._draft_group} - self._layers.keys() if kind is TransferKind.RESTORE else set()
        transfer = self._transfers.start(kind, n_bytes, optional)
        end = self._ends[transfer.id] = asyncio.get_running_loop().create_future()
        for group, own in tensors.items():
            link = self._links.get(group)
            problem = "it is away" if link is None else self._refusing if groups is None else ""
            if link is not None and not problem:
                try:
                    link.send(message(transfer.id, file.file, place, own), request_id=transfer.id, fds=[file.fd])
                except (ProtocolError, OSError) as error:
                    problem = str(error)
            if problem:
                self._end(self._transfers.failed(group, transfer.id, f"group {group} could not be asked: {problem}"))
        return end

    def _tensors(self, file: TransferFile) -> dict[str, list[SnapshotTensor]]:
        """Return what each group writes or reads."""
        tensors = {group: [t for r in ranges for t in file.tensors(r)] for group, ranges in self._layers.items()}
        if drafts := file.draft_tensors():
            tensors[self._draft_group] = tensors.get(self._draft_group, []) + drafts
        return tensors

    def _end(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            end = self._ends.pop(transfer.id)
            if not end.done():
                end.set_result(transfer)
