"""KV transfers (saves and restores) over the links of all groups: one file, a message to every daemon, one outcome.

Invariant: every transfer ends once each daemon has answered or is lost, never earlier, even after a failure; until then
it owns its pages and descriptor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from lucevisor.model.values import LayerRange
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import Restore, Restored, Save, Saved, SlotPlace, SnapshotTensor, TransferFailed
from lucevisor.protocol.transport import Channel


@dataclass(slots=True, eq=False)
class TransferFile:
    """A file that daemons write or read.  ``file``: its name; ``with_draft``: with the drafter's tensors."""

    file: str
    fd: int
    contents: Sequence[SnapshotTensor]
    with_draft: bool = True

    def tensors(self, layers: LayerRange) -> list[SnapshotTensor]:
        """Return the tensors that a daemon with these layers writes and reads."""
        return [tensor for tensor in self.contents if tensor.layer in layers and not tensor.draft]

    def draft_tensors(self) -> list[SnapshotTensor]:
        """Return the tensors that the daemon of the draft stage writes and reads."""
        return [tensor for tensor in self.contents if tensor.draft and self.with_draft]

    def n_bytes(self, tensors: Sequence[SnapshotTensor]) -> int:
        return sum(tensor.n_bytes for tensor in tensors)


@dataclass(slots=True)
class Transfer:
    """``expected_bytes``: by group that has not answered.  ``problem``: why it failed; empty so far or on success.

    ``optional``: groups whose failure does not fail the transfer; ``without``: those of them that failed, and why.
    """

    id: int
    expected_bytes: dict[str, int] = field(default_factory=dict)
    n_bytes: int = 0
    converted: str = ""
    problem: str = ""
    optional: Collection[str] = ()
    without: dict[str, str] = field(default_factory=dict)
    end: asyncio.Future[Transfer] | None = None


class ShardTransfers:
    """``layers[g]``: the layer ranges of group g.  ``draft_group``: the group that runs the draft stage, or empty."""

    def __init__(self, layers: Mapping[str, Sequence[LayerRange]], draft_group: str = "") -> None:
        self._layers = {group: tuple(ranges) for group, ranges in layers.items()}
        self._draft_group = draft_group
        self._links: dict[str, Channel] = {}
        self._transfers: dict[int, Transfer] = {}
        self._ids = count(1)
        self._refusing = ""  # why no snapshot is saved or restored

    def on_ready(self, group: str, link: Channel) -> None:
        """Called when a daemon has loaded."""
        self._links[group] = link
        self._refusing = ""

    async def quiesce(self, reason: str) -> None:
        """Refuse snapshots until ``resume`` or a daemon is ready, and wait for those in progress: their daemons write
        pages."""
        self._refusing = reason
        while ends := [transfer.end for transfer in self._transfers.values() if transfer.end is not None]:
            await asyncio.wait(ends)

    def resume(self) -> None:
        """Accept snapshots again."""
        self._refusing = ""

    def on_lost(self, group: str, reason: str) -> None:
        """Called when a daemon is lost, or about to be, and will not answer."""
        self._links.pop(group, None)
        for transfer in [*self._transfers.values()]:
            self._answered(group, transfer.id, problem=f"group {group} was lost: {reason}")

    def frame(self, group: str, frame: Frame) -> bool:
        """Handle a daemon's answer; False if the frame does not belong to a transfer."""
        match frame.message:
            case Saved() as saved:
                self._answered(group, saved.transfer, saved.n_bytes)
            case Restored() as restored:
                self._answered(group, restored.transfer, restored.n_bytes, restored.converted)
            case TransferFailed() as failed:
                self._answered(group, failed.transfer, problem=f"group {group}, {failed.where}: {failed.reason}")
            case _:
                return False
        return True

    def save(
        self, file: TransferFile, place: SlotPlace, groups: Collection[str] | None = None
    ) -> asyncio.Future[Transfer]:
        """Let every daemon, or those of ``groups``, write its tensors; the future completes when all are done with the
        file.
        """
        return self._begin(Save, file, place, groups)

    def restore(
        self, file: TransferFile, place: SlotPlace, groups: Collection[str] | None = None
    ) -> asyncio.Future[Transfer]:
        """Let every daemon, or those of ``groups``, read its tensors; the future completes when all are done with the
        file.

        A daemon that runs the drafter alone may fail or be away: ``Transfer.without`` then names its group.
        """
        return self._begin(Restore, file, place, groups)

    def _begin(
        self, message: type[Save | Restore], file: TransferFile, place: SlotPlace, groups: Collection[str] | None
    ) -> asyncio.Future[Transfer]:
        tensors = {group: own for group, own in self._tensors(file).items() if groups is None or group in groups}
        transfer = Transfer(next(self._ids), {group: file.n_bytes(own) for group, own in tensors.items()})
        if message is Restore:
            transfer.optional = {self._draft_group} - self._layers.keys()
        end = transfer.end = asyncio.get_running_loop().create_future()
        self._transfers[transfer.id] = transfer
        for group, own in tensors.items():
            link = self._links.get(group)
            problem = "it is away" if link is None else self._refusing if groups is None else ""
            if link is not None and not problem:
                try:
                    link.send(message(transfer.id, file.file, place, own), request_id=transfer.id, fds=[file.fd])
                except (ProtocolError, OSError) as error:
                    problem = str(error)
            if problem:
                self._answered(group, transfer.id, problem=f"group {group} could not be asked: {problem}")
        return end

    def _tensors(self, file: TransferFile) -> dict[str, list[SnapshotTensor]]:
        """Return what each group writes or reads."""
        tensors = {group: [t for r in ranges for t in file.tensors(r)] for group, ranges in self._layers.items()}
        if drafts := file.draft_tensors():
            tensors[self._draft_group] = tensors.get(self._draft_group, []) + drafts
        return tensors

    def _answered(
        self, group: str, transfer_id: int, n_bytes: int = 0, converted: str = "", *, problem: str = ""
    ) -> None:
        """Handle the answer of a group, or its loss; late and repeated answers count for nothing."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or group not in transfer.expected_bytes:
            return
        expected = transfer.expected_bytes.pop(group)
        transfer.n_bytes += n_bytes
        transfer.converted = transfer.converted or converted
        if not problem and n_bytes != expected:
            problem = f"group {group} moved {n_bytes} bytes of {expected}"
        if problem and group in transfer.optional:
            transfer.without[group] = problem
        else:
            transfer.problem = transfer.problem or problem
        if not transfer.expected_bytes:
            del self._transfers[transfer_id]
            if transfer.end is not None and not transfer.end.done():
                transfer.end.set_result(transfer)
