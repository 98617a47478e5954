"""What can go wrong on a wire, as exceptions that say what happened, where, and what to do.

Knows no sockets and no messages.  Invariant: every error carries the three texts, so a log line or an HTTP body can
show them apart; ``str(error)`` joins them.
"""

from __future__ import annotations


class WireError(Exception):
    """Root of the errors of this package.

    ``what`` happened, ``where`` (link name, byte, field, descriptor), ``advice`` for the person who reads it.
    """

    def __init__(self, what: str, where: str, advice: str) -> None:
        super().__init__(what, where, advice)
        self.what = what
        self.where = where
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.what} ({self.where}): {self.advice}"


class RemoteProtocolError(WireError):
    """The peer sent what the protocol forbids.  Nothing is read from that connection any more: a byte stream that was
    damaged once has no next frame."""


class LocalProtocolError(WireError):
    """This side tried to send what the protocol forbids.  Nothing was sent; the connection is as before."""


class LinkClosed(WireError):
    """The link is dead: end of file, EPIPE, ECONNRESET, or closed by this side (``local``)."""

    def __init__(self, what: str, where: str, advice: str, *, local: bool = False) -> None:
        super().__init__(what, where, advice)
        self.local = local


class LinkOverflow(WireError):
    """The peer reads too slowly: more bytes wait for it than the link may hold.  The link is closed."""


class ArenaError(WireError):
    """A shared memory arena could not be made, or the one offered is not the one planned."""
