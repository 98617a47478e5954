"""Errors of the protocol between supervisor and daemons: what happened, where, and what to do, in three texts."""

from __future__ import annotations


class ProtocolError(Exception):
    """Base class of this package's errors.

    ``what`` happened, ``where`` (link name, byte, field, descriptor), and ``advice`` for the operator.
    """

    def __init__(self, what: str, where: str, advice: str) -> None:
        super().__init__(what, where, advice)
        self.what = what
        self.where = where
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.what} ({self.where}): {self.advice}"


class RemoteProtocolError(ProtocolError):
    """The peer violated the protocol.  The connection reads nothing more: a damaged byte stream has no next frame."""


class LocalProtocolError(ProtocolError):
    """This side tried to violate the protocol.  Nothing was sent and the connection is unchanged."""


class LinkClosed(ProtocolError):
    """The link is dead: end of file, EPIPE, ECONNRESET, closed by this side (``local``), or the peer's host answers no
    more (``cut``)."""

    def __init__(self, what: str, where: str, advice: str, *, local: bool = False, cut: bool = False) -> None:
        super().__init__(what, where, advice)
        self.local = local
        self.cut = cut


class LinkOverflow(ProtocolError):
    """The peer reads too slowly and the send queue is over its limit.  The link is closed."""


class ArenaError(ProtocolError):
    """A shared-memory arena could not be created, or the one received does not match its plan."""
