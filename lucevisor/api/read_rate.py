"""Whether a client takes what waits for it, by what its kernel acknowledged.

Knows sockets, no HTTP.  Invariant: a client that takes the least rate on average over each window is never slow, and
one for which nothing waits neither.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

_BYTES_ACKED: Final = struct.Struct("=120xQ")
"""Of Linux's tcp_info, whose fields are only ever added to at the end."""


class ReadRate:
    """What one client takes, looked at about once a second."""

    __slots__ = ("_n_taken", "_since_s")

    def __init__(self) -> None:
        self._since_s: float | None = None  # None: nothing waits
        self._n_taken = 0

    def is_slow(self, now: float, link: asyncio.Transport, window_s: float, min_rate: float) -> bool:
        """Return whether bytes waited all through a window that is over, and fewer than `min_rate` a second went."""
        if link.get_write_buffer_size() == 0:
            self._since_s = None
            return False
        if self._since_s is not None and now - self._since_s <= window_s:
            return False
        before, self._n_taken = self._n_taken, _acknowledged(link)
        began, self._since_s = self._since_s, now
        return began is not None and self._n_taken - before < min_rate * (now - began)


def _acknowledged(link: asyncio.Transport) -> int:
    """Return how many bytes the other side's kernel has taken since the connection began."""
    info = link.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    return int(_BYTES_ACKED.unpack(info)[0])
