"""Transfers: units of state from daemons to files and back, whoever owns the files.

A transfer is a message to every daemon for each unit, and one outcome.  A daemon has credits; more messages wait, until
a failure, a loss, a ``Reset`` or ``quiesce`` cancels them.  Invariant: a transfer ends once each daemon that was sent a
message has answered or is lost; until then it owns its pages and descriptor.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import structlog

from lucevisor.errors import LucevisorError
from lucevisor.kv_transfer.host_memory import HostMemory
from lucevisor.kv_transfer.layout import unit_tensors, with_offsets
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import PAGE_TOKENS, Dtype, KvGroup, LayerRange
from lucevisor.placement.result import HostOwner
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import Restore, Restored, Save, Saved, SlotPlace, TransferFailed, TransferTensor
from lucevisor.protocol.transport import Channel

log = structlog.get_logger("lucevisor.kv_transfer")

CREDITS: Final = 16
"""Messages that a daemon has at once, of the 64 that it accepts; each holds a descriptor."""


@dataclass(slots=True, eq=False)
class TransferFile:
    """One unit of state in a file.  ``file``: its name; ``with_draft``: with the drafter's tensors."""

    file: str
    fd: int
    contents: Sequence[TransferTensor]
    with_draft: bool = True

    def tensors(self, layers: LayerRange) -> list[TransferTensor]:
        return [tensor for tensor in self.contents if tensor.layer in layers and not tensor.draft]

    def draft_tensors(self) -> list[TransferTensor]:
        return [tensor for tensor in self.contents if tensor.draft and self.with_draft]

    def n_bytes(self, tensors: Sequence[TransferTensor]) -> int:
        return sum(tensor.n_bytes for tensor in tensors)


class HostState:
    """Units of state one after the other in host memory; ``what`` they are, for errors.  Raises HostMemoryShort."""

    def __init__(
        self,
        memory: HostMemory,
        owner: HostOwner,
        what: str,
        units: Iterable[Sequence[TransferTensor]],
        limit_bytes: int | None = None,
    ) -> None:
        laid_out, self.n_bytes = [], 0
        for tensors in units:
            laid_out.append(with_offsets(tensors, self.n_bytes))
            self.n_bytes += sum(tensor.n_bytes for tensor in tensors)
        self._memory, self._file = memory, memory.open(owner, self.n_bytes, limit_bytes)
        self.units = [TransferFile(what, self._file.fileno(), tensors) for tensors in laid_out]

    def close(self) -> None:
        """Release the memory; idempotent."""
        self._memory.release(self._file)


Units = Iterable[tuple[TransferFile, SlotPlace]]
"""Units of state and where the daemons hold them."""


@dataclass(slots=True, eq=False)
class Transfer:
    """``problem``: why it failed, or empty.  ``without``: groups that did not load the drafter's state, and why.

    ``fds``: own descriptors of its files, which a caller may close before.
    """

    n_bytes: int = 0
    converted: str = ""
    problem: str = ""
    without: dict[str, str] = field(default_factory=dict)
    n_unanswered: int = 0
    fds: dict[int, int] = field(default_factory=dict)
    end: asyncio.Future[Transfer] = field(default_factory=asyncio.Future)


@dataclass(slots=True, eq=False)
class _Message:
    transfer: Transfer
    order: Save | Restore
    fd: int
    expected_bytes: int


@dataclass(slots=True, eq=False)
class _Daemon:
    """What a daemon was sent and has not answered, by transfer id, and what waits for credits."""

    link: Channel | None = None
    sent: dict[int, _Message] = field(default_factory=dict)
    waiting: deque[_Message] = field(default_factory=deque)


class KvTransfer:
    """``layers[g]``: the layer ranges of group g.  ``draft_group``: the group that runs the draft stage, or empty."""

    def __init__(self, layers: Mapping[str, Sequence[LayerRange]], draft_group: str = "") -> None:
        self._layers = {group: tuple(ranges) for group, ranges in layers.items()}
        self._draft_group = draft_group
        self._daemons: defaultdict[str, _Daemon] = defaultdict(_Daemon)
        self._transfers: set[Transfer] = set()
        self._ids = count(1)
        self._refusing = ""  # why nothing is moved for prefix slots

    def on_ready(self, group: str, link: Channel) -> None:
        self._daemons[group].link = link
        self._refusing = ""

    async def quiesce(self, reason: str) -> None:
        """Refuse transfers until ``resume`` or a daemon is ready, cancel what waits, and await the rest."""
        self._refusing = reason
        for group in [*self._daemons]:
            self.cancel_waiting(group, reason)
        while self._transfers:
            await asyncio.wait([transfer.end for transfer in self._transfers])

    def cancel_waiting(self, group: str, reason: str) -> None:
        """Cancel the messages of a group that wait for credits, as ``Reset`` does with those that were sent."""
        waiting = self._daemons[group].waiting
        while waiting:
            self._end(group, waiting.popleft(), f"it was cancelled: {reason}")

    def resume(self) -> None:
        self._refusing = ""

    def on_lost(self, group: str, reason: str) -> None:
        """Called when a daemon is lost, or about to be, and will not answer."""
        daemon = self._daemons[group]
        messages = [*daemon.sent.values(), *daemon.waiting]
        daemon.link = None
        daemon.sent.clear()
        daemon.waiting.clear()
        for message in messages:
            self._end(group, message, f"group {group} was lost: {reason}")

    def frame(self, group: str, frame: Frame) -> bool:
        """Handle a daemon's answer; False if the frame is none.  Late and repeated answers count for nothing."""
        answer = frame.message
        if not isinstance(answer, Saved | Restored | TransferFailed):
            return False
        daemon = self._daemons[group]
        message = daemon.sent.pop(answer.transfer, None)
        if message is None:
            return True
        if isinstance(answer, TransferFailed):
            problem = f"group {group}, {answer.where}: {answer.reason}"
        else:
            transfer = message.transfer
            transfer.n_bytes += answer.n_bytes
            transfer.converted = transfer.converted or (answer.converted if isinstance(answer, Restored) else "")
            is_whole = answer.n_bytes == message.expected_bytes
            problem = "" if is_whole else f"group {group} moved {answer.n_bytes} bytes of {message.expected_bytes}"
        self._end(group, message, problem)
        self._send(group)
        return True

    def save(self, units: Units, groups: Collection[str] | None = None) -> asyncio.Future[Transfer]:
        """Let every daemon, or those of ``groups``, write its tensors; completes when all are done with the files."""
        return self._begin(Save, units, groups)

    def load(self, units: Units, groups: Collection[str] | None = None) -> asyncio.Future[Transfer]:
        """Let every daemon, or those of ``groups``, read its tensors; completes when all are done with the files.

        One that runs the drafter alone may fail: ``Transfer.without`` then names its group.
        """
        return self._begin(Restore, units, groups)

    def _begin(
        self, kind: type[Save | Restore], units: Units, groups: Collection[str] | None
    ) -> asyncio.Future[Transfer]:
        units, transfer = list(units), Transfer()
        self._transfers.add(transfer)
        try:
            transfer.fds = {fd: os.dup(fd) for fd in {file.fd for file, _ in units}}
        except OSError as error:
            transfer.problem = f"no descriptor is left: {error}"
            units = []
        messages = []
        for file, place in units:
            for group, tensors in self._tensors(file).items():
                if tensors and (groups is None or group in groups):
                    order = kind(next(self._ids), file.file, place, tensors)
                    messages.append((group, _Message(transfer, order, transfer.fds[file.fd], file.n_bytes(tensors))))
        transfer.n_unanswered = 1 + len(messages)  # one for this method
        for group, message in messages:
            daemon = self._daemons[group]
            problem = "it is away" if daemon.link is None else self._refusing if groups is None else ""
            if problem:
                self._end(group, message, f"group {group} could not be asked: {problem}")
            else:
                daemon.waiting.append(message)
        for group in dict(messages):
            self._send(group)
        self._count_down(transfer)
        return transfer.end

    def _tensors(self, file: TransferFile) -> dict[str, list[TransferTensor]]:
        tensors = {group: [t for r in ranges for t in file.tensors(r)] for group, ranges in self._layers.items()}
        if drafts := file.draft_tensors():
            tensors[self._draft_group] = tensors.get(self._draft_group, []) + drafts
        return tensors

    def _send(self, group: str) -> None:
        daemon = self._daemons[group]
        while daemon.waiting and daemon.link is not None and len(daemon.sent) < CREDITS:
            message = daemon.waiting.popleft()
            if message.transfer.problem:  # another part of it failed
                self._end(group, message)
                continue
            daemon.sent[message.order.transfer] = message
            try:
                daemon.link.send(message.order, request_id=message.order.transfer, fds=[message.fd])
            except (ProtocolError, OSError) as error:
                if daemon.sent.pop(message.order.transfer, None) is not None:
                    self._end(group, message, f"group {group} could not be asked: {error}")

    def _end(self, group: str, message: _Message, problem: str = "") -> None:
        transfer = message.transfer
        is_optional = group == self._draft_group and group not in self._layers and isinstance(message.order, Restore)
        if problem and is_optional:
            transfer.without[group] = problem
        else:
            transfer.problem = transfer.problem or problem
        self._count_down(transfer)

    def _count_down(self, transfer: Transfer) -> None:
        transfer.n_unanswered -= 1
        if not transfer.n_unanswered:
            self._transfers.discard(transfer)
            for fd in transfer.fds.values():
                os.close(fd)
            if not transfer.end.done():
                transfer.end.set_result(transfer)


class ExportedState:
    """The ``units`` of ``layers``, and of the drafter's if there are any (``with_draft``).  Raises HostMemoryShort."""

    def __init__(
        self,
        memory: HostMemory,
        layers: Sequence[LayerSpec],
        kv_dtype: Dtype,
        units: Mapping[KvGroup, Sequence[int]],
        draft_layers: Sequence[LayerSpec] = (),
    ) -> None:
        places = [(kv_group, place) for kv_group, ids in units.items() for place in _slot_places(kv_group, ids)]
        tensors = [unit_tensors(kv_group, place.n_tokens, layers, kv_dtype, draft_layers) for kv_group, place in places]
        self._state = HostState(memory, HostOwner.EXPORTS, "the state of running requests in host memory", tensors)
        self.with_draft, self.n_bytes = bool(draft_layers), self._state.n_bytes
        self.units = [(file, place) for file, (_, place) in zip(self._state.units, places, strict=True)]

    async def save(self, transfers: KvTransfer, groups: Collection[str]) -> None:
        """Let ``groups`` write their layers, once transfers of prefix slots are over, and refused.  Raises
        LucevisorError."""
        began = time.monotonic()
        await transfers.quiesce("its state is handed to another daemon")
        await self._moved(transfers.save(self.units, groups), "state exported", groups, began)

    async def load(self, transfers: KvTransfer, groups: Collection[str]) -> None:
        """Let ``groups`` read their layers, and release the memory.  Raises LucevisorError."""
        began = time.monotonic()
        try:
            await self._moved(transfers.load(self.units, groups), "state imported", groups, began)
        finally:
            self.close()

    async def _moved(self, end: asyncio.Future[Transfer], event: str, groups: Collection[str], began: float) -> None:
        transfer = await end
        if transfer.problem:
            raise LucevisorError(transfer.problem)
        log.info(event, groups=[*groups], n_bytes=self.n_bytes, seconds=round(time.monotonic() - began, 3))

    def close(self) -> None:
        self._state.close()


def _slot_places(kv_group: KvGroup, ids: Sequence[int]) -> list[SlotPlace]:
    """Return what holds these units: pages as if of one sequence, states one by one."""
    if kv_group is KvGroup.RECURRENT:
        return [SlotPlace(0, state=state) for state in ids]
    if not ids:
        return []
    n_tokens = PAGE_TOKENS * len(ids)
    return [SlotPlace(n_tokens, full=[*ids]) if kv_group is KvGroup.FULL else SlotPlace(n_tokens, window=[*ids])]
