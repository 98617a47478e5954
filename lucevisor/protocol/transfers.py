"""Records of snapshot transfers: saving and restoring a prefix slot.  No sockets, no tensors."""

from __future__ import annotations

import msgspec


class SnapshotTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a snapshot file (docs/snapshot-format.md) and the location of its bytes.

    ``kind`` identifies it within its ``layer``: the name of a state tensor, with suffix ``.scale`` for the scales of
    q8_0.  Axis 0 of a paged tensor is positions, starting at ``first`` (window layers keep only visible positions).
    ``draft``: of the drafter, whose layers are numbered by themselves.
    """

    name: str
    layer: int  # absolute
    kind: str
    dtype: str  # in safetensors notation: F32, BF16, F16, I8
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    n_bytes: int
    first: int = 0
    draft: bool = False


class SlotPlace(msgspec.Struct, frozen=True, array_like=True):
    """Pages and state of a prefix slot of ``n_tokens``.

    ``full[i]`` holds positions [64 i, 64 i + 64), ``window[i]`` those of entry ``first_window + i``; ``state`` is the
    recurrent state, -1 if none.
    """

    n_tokens: int
    full: list[int] = []
    window: list[int] = []
    first_window: int = 0
    state: int = -1


class Save(msgspec.Struct, frozen=True):
    """Write ``tensors``, those of the daemon's layers, to a snapshot file, whose descriptor travels with the frame.

    The supervisor keeps every page and state of ``place`` unchanged until the answer, so steps continue meanwhile.
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
    """Read ``tensors`` from a snapshot file into the pages and state of ``place``, which no sequence uses yet.

    The transfer owns them until it is answered by Restored or TransferFailed.  ``place.n_tokens`` may be less than the
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
    """Answer to a Save or Restore that failed; the daemon keeps running.  A device failure is a Failed instead."""

    transfer: int
    where: str  # file and tensor
    reason: str
    advice: str
    details: str = ""  # traceback
