"""Index of a model's snapshots, sorted by their packed tokens: finds the file that restores most of a prompt.

The longest common prefix with a prompt is next to the place where the prompt would be inserted, and the common prefixes
of neighbours are known, so a lookup compares only two files with the prompt.
Invariants: a match never reaches beyond the prompt; with
``whole_only`` a file matches whole or not at all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from lucevisor.kv.tokens import TOKEN_BYTES, TokenBuffer
from lucevisor.snapshots.policy import SnapshotEntry, SnapshotMatch

_LAST = "\U0010ffff"
"""Sorts after every file name."""


class SnapshotIndex:
    """Entries by file name and by tokens."""

    def __init__(self, entries: Iterable[SnapshotEntry] = ()) -> None:
        self._entries: dict[str, SnapshotEntry] = {}
        self._keys: list[tuple[bytes, str]] = []
        self._common: list[int] = []  # tokens that keys i and i + 1 have in common
        for entry in entries:
            self.put(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, file: str) -> bool:
        return file in self._entries

    def __iter__(self) -> Iterator[SnapshotEntry]:
        return iter(self._entries.values())

    def get(self, file: str) -> SnapshotEntry | None:
        """Return the entry of a file name."""
        return self._entries.get(file)

    def put(self, entry: SnapshotEntry) -> None:
        """Add an entry; it replaces the one of the same name."""
        known = self._entries.get(entry.file)
        if known is not None and known.snapshot.packed_tokens != entry.snapshot.packed_tokens:
            self.remove(entry.file)
            known = None
        self._entries[entry.file] = entry
        if known is None:
            key = (entry.snapshot.packed_tokens, entry.file)
            insort(self._keys, key)
            at = bisect_left(self._keys, key)
            self._common.insert(at, 0)
            self._compare(at - 1)
            self._compare(at)

    def remove(self, file: str) -> None:
        """Forget a file; does nothing if it is unknown."""
        entry = self._entries.pop(file, None)
        if entry is not None:
            at = bisect_left(self._keys, (entry.snapshot.packed_tokens, file))
            del self._keys[at], self._common[at]
            self._compare(at - 1)

    def find(self, prompt: TokenBuffer, most: int, *, whole_only: bool) -> SnapshotMatch | None:
        """Return the entry that holds most of ``prompt[:most]``; of several, the one used last.

        ``whole_only``: entries count only if all of their tokens are a prefix of the prompt.
        """
        if not self._entries:
            return None
        wanted = prompt.packed(0, most)
        at = bisect_left(self._keys, (wanted, _LAST))
        found = [(n, i) for i, n in self._before(at, wanted) if not whole_only or n == self._n_tokens(i)]
        if not whole_only:
            found += [(n, i) for i, n in self._after(at, wanted)]
        best = max((n for n, _ in found), default=0)
        usable = [self._entries[self._keys[i][1]] for n, i in found if n == best]
        return SnapshotMatch(max(usable, key=lambda entry: entry.used_s), best) if best else None

    def _before(self, at: int, wanted: bytes) -> Iterator[tuple[int, int]]:
        """Yield keys before ``at``, nearest first, with the tokens they have in common with ``wanted``."""
        n = common_tokens(self._keys[at - 1][0], wanted) if at else 0
        while at > 0 and n:
            at -= 1
            yield at, n
            n = min(n, self._common[at - 1]) if at else 0

    def _after(self, at: int, wanted: bytes) -> Iterator[tuple[int, int]]:
        n = common_tokens(self._keys[at][0], wanted) if at < len(self._keys) else 0
        while at < len(self._keys) and n:
            yield at, n
            n = min(n, self._common[at])
            at += 1

    def _n_tokens(self, i: int) -> int:
        return len(self._keys[i][0]) // TOKEN_BYTES

    def _compare(self, i: int) -> None:
        if 0 <= i < len(self._keys) - 1:
            self._common[i] = common_tokens(self._keys[i][0], self._keys[i + 1][0])


def common_tokens(a: bytes, b: bytes) -> int:
    """Return how many tokens two packed texts have in common from the start."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    with memoryview(b) as view:
        if a.startswith(view[: high * TOKEN_BYTES]):
            return high
        step = 16
        while low < high:  # ever longer strides while all is equal, then halves
            at = min(low + step, high)
            if a.startswith(view[low * TOKEN_BYTES : at * TOKEN_BYTES], low * TOKEN_BYTES):
                low, step = at, step * 2
            else:
                high, step = at - 1, max(1, (at - low) // 2)
    return low
