"""Small value types shared by supervisor and daemons."""

from __future__ import annotations

import os
from enum import StrEnum

import msgspec

PAGE_TOKENS = 64
"""Token positions per page (block size of the paged KV cache), in every pool of every shard."""


class Backend(StrEnum):
    """An accelerator stack.  torch names the devices of both cuda and hip ``cuda``."""

    CPU = "cpu"
    CUDA = "cuda"
    HIP = "hip"


class Dtype(StrEnum):
    """Number formats of activations, boundary activations and attention state."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    Q8_0 = "q8_0"  # attention state only: blocks of 32 int8 with one float16 scale


class KvGroup(StrEnum):
    """KV cache group: the layers of a model whose state has the same lifetime."""

    FULL = "full"  # attention over all positions: pages live as long as the sequence
    WINDOW = "window"  # sliding attention: pages older than the window are released
    RECURRENT = "recurrent"  # one state per sequence, overwritten each step


KvGroup = KvGroup
"""Its former name, in a test of kernels, until it is run and recorded again."""


class Tier(StrEnum):
    """The memory that a page or a recurrent state lies in."""

    DEVICE = "device"  # where layers compute on it
    HOST = "host"  # kept, and copied to the device before use


SCALE = ".scale"
"""Suffix of a state tensor that holds the scales of q8_0 codes."""


class LayerRange(msgspec.Struct, frozen=True, array_like=True):
    """Half-open range ``[start, stop)`` of absolute layer indices."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop

    def __str__(self) -> str:
        return f"[{self.start},{self.stop})"


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a file's content on this host: its fstat and the sha256 of its GGUF header.

    Every write changes ``ctime_ns``, which ``os.utime`` cannot set back.
    """

    device: int
    inode: int
    n_bytes: int
    mtime_ns: int
    ctime_ns: int
    header: str


def identity_of(s: os.stat_result, header: str) -> FileIdentity:
    return FileIdentity(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns, header)


Q8_GROUP = 32
"""Numbers of q8_0 state that share one float16 scale."""


def q8_groups(n: int) -> int:
    return -(-n // Q8_GROUP)


def dtype_bytes(dtype: Dtype, n: int) -> int:
    """Bytes of ``n`` consecutive numbers stored as ``dtype``; q8_0 rounds up to whole groups."""
    if dtype is Dtype.Q8_0:
        return q8_groups(n) * (Q8_GROUP + 2)
    return n * (4 if dtype is Dtype.FLOAT32 else 2)
