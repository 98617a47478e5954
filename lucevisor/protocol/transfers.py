"""Records of saving and restoring a prefix slot: which tensors, from where to where.  No sockets, no tensors."""

from __future__ import annotations

import msgspec


class SnapshotTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a snapshot file (docs/snapshot-format.md), and where its bytes lie.

    ``kind`` names it among those of its ``layer``: the name of a state tensor, with ``.scale`` behind it for the scales
    of q8_0.  Axis 0 of a paged one are positions, from ``first`` on (window layers keep what is still visible).
    """

    name: str
    layer: int  # absolute
    kind: str
    dtype: str  # as safetensors writes it: F32, BF16, F16, I8
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    n_bytes: int
    first: int = 0


class SlotPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a prefix slot of ``n_tokens`` lies, or shall lie, in the pools.

    ``full[i]`` holds positions [64 i, 64 i + 64), ``window[i]`` those of entry ``first_window + i``; ``state`` is its
    recurrent state, -1 without one.
    """

    n_tokens: int
    full: list[int] = []
    window: list[int] = []
    first_window: int = 0
    state: int = -1


class Save(msgspec.Struct, frozen=True):
    """Write ``tensors``, those of the daemon's own layers, into a snapshot file; its descriptor travels along.

    The supervisor leaves every page and state of ``place`` unchanged until the answer, so steps go on meanwhile.
    ``file`` is for error messages.  Answered by Saved or TransferFailed.
    """

    transfer: int
    file: str
    place: SlotPlace
    tensors: list[SnapshotTensor]


class Saved(msgspec.Struct, frozen=True):
    transfer: int
    n_bytes: int
    seconds: float


class Restore(msgspec.Struct, frozen=True):
    """Read ``tensors`` from a snapshot file into the pages and the state of ``place``, which no sequence uses yet.

    They belong to the transfer until the answer: Restored or TransferFailed.  ``place.n_tokens`` may be less than the
    file holds.
    """

    transfer: int
    file: str
    place: SlotPlace
    tensors: list[SnapshotTensor]


class Restored(msgspec.Struct, frozen=True):
    transfer: int
    n_bytes: int
    seconds: float
    converted: str = ""  # "BF16 to float32" when file and pools hold different number formats


class TransferFailed(msgspec.Struct, frozen=True):
    """Answer to a Save or Restore that could not be done; the daemon goes on.  One whose device failed sends Failed."""

    transfer: int
    where: str  # file and tensor
    reason: str
    advice: str
    details: str = ""  # traceback
