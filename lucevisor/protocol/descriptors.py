"""Passing file descriptors over a Unix socket (SCM_RIGHTS).

Knows ancillary data, no frames.  Invariant: descriptors received with :data:`RECEIVE_FLAGS` are close-on-exec, and
:data:`LOST_FLAG` reveals any that the kernel dropped.
"""

from __future__ import annotations

import os
import socket
from array import array
from typing import TYPE_CHECKING

from lucevisor.protocol.frames import MAX_DESCRIPTORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

# Plain ints: operations on the enums of socket run Python code, here once per frame.
RECEIVE_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
RECEIVE_NOW_FLAGS = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
LOST_FLAG = int(socket.MSG_CTRUNC)
ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)

MAX_BUFFERS = 512  # of one sendmsg; the kernel takes at most 1024 (UIO_MAXIOV)


def pack(fds: Sequence[int]) -> list[tuple[int, int, Buffer]]:
    """Ancillary data for a sendmsg; ``fds`` travel with its first byte."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []


def unpack(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in the ancillary data of a recvmsg, now owned by the caller."""
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def close_all(fds: Iterable[int]) -> None:
    """Close unclaimed descriptors."""
    for fd in fds:
        os.close(fd)


def after(buffers: Sequence[bytes | memoryview], n_sent: int) -> list[bytes | memoryview]:
    """What remains of ``buffers`` after a sendmsg wrote the first ``n_sent`` bytes."""
    rest: list[bytes | memoryview] = []
    for buffer in buffers:
        if n_sent >= len(buffer):
            n_sent -= len(buffer)
        else:
            rest.append(memoryview(buffer)[n_sent:] if n_sent else buffer)
            n_sent = 0
    return rest
