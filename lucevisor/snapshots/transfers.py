"""Tracks which daemons still have to answer a Save or Restore: several work on one file, with one outcome.

Pure: answers in, outcomes out; knows no links and no files.  Invariant: a transfer ends once every daemon has answered
or is lost, never earlier, even after a failure: until then it owns its pages and descriptors.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum


class TransferKind(StrEnum):
    SAVE = "save"
    RESTORE = "restore"


@dataclass(slots=True)
class Transfer:
    """``expected_bytes``: by group.  ``problem``: why it failed; empty so far or on success.

    ``optional``: groups whose failure does not fail the transfer; ``without``: those of them that failed, and why.
    """

    id: int
    kind: TransferKind
    expected_bytes: Mapping[str, int]
    waiting: set[str] = field(default_factory=set)
    n_bytes: int = 0
    converted: str = ""
    problem: str = ""
    optional: frozenset[str] = frozenset()
    without: dict[str, str] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return not self.waiting


class TransferTable:
    """All transfers in progress.  Methods that end one return it; check its ``problem``."""

    def __init__(self) -> None:
        self._next = 0
        self._open: dict[int, Transfer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def start(
        self, kind: TransferKind, expected_bytes: Mapping[str, int], optional: Set[str] = frozenset()
    ) -> Transfer:
        """Start a transfer that waits for every group named.  Raises ValueError without groups."""
        if not expected_bytes:
            raise ValueError(f"a {kind.value} without groups; name at least one")
        self._next += 1
        transfer = Transfer(self._next, kind, dict(expected_bytes), set(expected_bytes), optional=frozenset(optional))
        self._open[transfer.id] = transfer
        return transfer

    def answered(self, group: str, transfer_id: int, n_bytes: int, converted: str = "") -> Transfer | None:
        """Handle Saved or Restored.  Returns the transfer if this was the last answer."""
        transfer = self._waiting_for(group, transfer_id)
        if transfer is None:
            return None
        transfer.n_bytes += n_bytes
        transfer.converted = transfer.converted or converted
        wanted = transfer.expected_bytes[group]
        problem = "" if n_bytes == wanted else f"group {group} moved {n_bytes} bytes of {wanted}"
        return self._strike(transfer, group, problem)

    def failed(self, group: str, transfer_id: int, reason: str) -> Transfer | None:
        """Handle TransferFailed, or a failed send.  Returns the transfer if this was the last answer."""
        transfer = self._waiting_for(group, transfer_id)
        return None if transfer is None else self._strike(transfer, group, reason)

    def lost(self, group: str, reason: str) -> list[Transfer]:
        """A daemon is lost and will not answer.  Returns the transfers that end with it."""
        mine = [t for t in self._open.values() if group in t.waiting]
        return [t for t in mine if self._strike(t, group, f"group {group} was lost: {reason}") is not None]

    def _waiting_for(self, group: str, transfer_id: int) -> Transfer | None:
        transfer = self._open.get(transfer_id)
        return transfer if transfer is not None and group in transfer.waiting else None

    def _strike(self, transfer: Transfer, group: str, problem: str) -> Transfer | None:
        transfer.waiting.discard(group)
        if problem and group in transfer.optional:
            transfer.without[group] = problem
        else:
            transfer.problem = transfer.problem or problem
        if not transfer.ended:
            return None
        del self._open[transfer.id]
        return transfer
