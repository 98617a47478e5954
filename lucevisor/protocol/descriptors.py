"""Descriptors over a Unix socket (SCM_RIGHTS).

Knows the kernel's ancillary data, no frames.  Invariant: what :func:`unpack` returns is close-on-exec when it was
received with :data:`RECEIVE_FLAGS`, and nothing that the kernel handed over is lost unseen.
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

# Plain numbers: an operation on the enums of socket runs Python code for each frame.
RECEIVE_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
RECEIVE_NOW_FLAGS = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
LOST_FLAG = int(socket.MSG_CTRUNC)
ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)

MAX_BUFFERS = 512  # of one sendmsg; the kernel takes at most 1024 (UIO_MAXIOV)


def pack(fds: Sequence[int]) -> list[tuple[int, int, Buffer]]:
    """Ancillary data that sends ``fds`` with the first byte of a sendmsg."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []


def unpack(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in what recvmsg returned, now owned by the caller."""
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that nobody will take."""
    for fd in fds:
        os.close(fd)


def after(buffers: Sequence[bytes | memoryview], n_sent: int) -> list[bytes | memoryview]:
    """The rest of byte buffers of which a sendmsg wrote the first ``n_sent`` bytes."""
    rest: list[bytes | memoryview] = []
    for buffer in buffers:
        if n_sent >= len(buffer):
            n_sent -= len(buffer)
        else:
            rest.append(memoryview(buffer)[n_sent:] if n_sent else buffer)
            n_sent = 0
    return rest
