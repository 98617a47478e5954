"""Token ids, packed as in the snapshot file (little-endian uint32): comparing a page of them is one memcmp."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final, overload

import numpy as np

from lucevisor.model.values import PAGE_TOKENS

TOKEN_BYTES: Final = 4
PAGE_BYTES: Final = PAGE_TOKENS * TOKEN_BYTES
_TYPECODE: Final = "I"


class TokenBuffer(Sequence[int]):
    """A growing sequence of token ids; slices are lists.  Texts with different LoRA ``adapter`` share nothing."""

    __slots__ = ("_ids", "adapter")

    def __init__(self, ids: Sequence[int] = (), adapter: str = "") -> None:
        """Copy ``ids``.  Raises OverflowError for an id that does not fit into 32 bits."""
        self._ids: array[int] = ids._ids[:] if isinstance(ids, TokenBuffer) else array(_TYPECODE, ids)
        self.adapter: str = adapter or (ids.adapter if isinstance(ids, TokenBuffer) else "")

    @classmethod
    def from_packed(cls, packed: bytes, adapter: str = "") -> TokenBuffer:
        buffer = cls(adapter=adapter)
        buffer._ids.frombytes(packed)
        return buffer

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenBuffer:
        """Return ``ids`` itself if it is packed already, else a packed copy."""
        return ids if isinstance(ids, TokenBuffer) else cls(ids)

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._ids[index].tolist() if isinstance(index, slice) else self._ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenBuffer):
            return self._ids == other._ids and self.adapter == other.adapter
        return isinstance(other, Sequence) and self._ids.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenBuffer({len(self)} ids)"

    def append(self, token: int) -> None:
        self._ids.append(token)

    def packed(self, start: int = 0, stop: int | None = None) -> bytes:
        return self._ids[start:stop].tobytes()

    def first(self, n: int) -> TokenBuffer:
        return TokenBuffer.from_packed(self.packed(0, n), self.adapter)

    def n_common_pages(self, pages: bytes, first: int, n_pages: int) -> int:
        """Return how many of the first ``n_pages`` packed pages of ``pages`` equal those from page ``first`` on."""
        start = first * PAGE_TOKENS
        return _n_equal(self._ids[start : start + n_pages * PAGE_TOKENS], pages) // PAGE_TOKENS

    def n_common(self, other: TokenBuffer, most: int) -> int:
        """Return how many ids both begin with, at most ``most``; 0 with different adapters."""
        return min(most, _n_equal(self._ids[:most], other._ids)) if self.adapter == other.adapter else 0


def _n_equal(ids: array[int], others: array[int] | bytes) -> int:
    mine, theirs = (np.frombuffer(memoryview(one).cast("B"), np.uint32) for one in (ids, others))
    n = min(len(mine), len(theirs))
    different = mine[:n] != theirs[:n]
    return int(different.argmax()) if different.any() else n
