"""Mutual authentication of a TCP connection, before its first frame: both ends prove that they have one secret.

    server  CHALLENGE     magic, version, 2 bytes of zero, nonce                            40 bytes
    client  RESPONSE      magic, version, purpose, a byte of zero, channel, nonce, MAC      88 bytes
    server  CONFIRMATION  MAC                                                               32 bytes

The server is who accepted the connection.  A MAC is HMAC-SHA256, with the secret as its key, over the name of the role
that sends it and all that was sent before, so the secret is never sent, and nothing that was recorded, or came from the
same end, is an answer.  ``binding`` is what both ends have of an outer layer: of TLS, the certificate's hash.
Opens no sockets.  Invariants: every message has a fixed size; MACs are compared in constant time.
"""

from __future__ import annotations

import hmac
import os
import struct
from enum import IntEnum
from typing import Final

from lucevisor.protocol.errors import ProtocolError

VERSION: Final = 1
NONCE_BYTES: Final = 32
CHANNEL_BYTES: Final = 16
MIN_SECRET_BYTES: Final = 32
MAX_SECRET_BYTES: Final = 4096
MAC_BYTES: Final = 32

_MAGIC: Final = b"LVAU"
_CHALLENGE: Final = struct.Struct(f"<4sHH{NONCE_BYTES}s")
_REQUEST: Final = struct.Struct(f"<4sHBB{CHANNEL_BYTES}s{NONCE_BYTES}s")  # a response without its MAC
CHALLENGE_BYTES: Final = _CHALLENGE.size
RESPONSE_BYTES: Final = _REQUEST.size + MAC_BYTES
NO_CHANNEL: Final = bytes(CHANNEL_BYTES)

_ADVICE: Final = "both ends need the same lucevisor, and the same secret in cluster.secret_file"


class Purpose(IntEnum):
    """What a connection is for.  Numbers are never reused."""

    LINK = 1
    HEARTBEAT = 2
    ROWS = 3
    FILES = 4


class AuthenticationError(ProtocolError):
    """The other end has not proved that it has the secret, or speaks something else."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "authentication", _ADVICE)


def key_of(content: bytes) -> bytes:
    """Return the key in the content of a file: all of it but surrounding white space.  Raises ValueError."""
    key = content.strip()
    if not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        raise ValueError(f"holds {len(key)} bytes, not {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}")
    return key


def read_key(fd: int) -> bytes:
    """Return the key that a file or pipe holds, and close it.  Raises OSError, ValueError."""
    with open(fd, "rb") as file:
        return key_of(file.read(MAX_SECRET_BYTES + 1024))


class ServerHandshake:
    """The end that accepted the connection.  Send ``challenge``, then what ``confirm`` returns."""

    def __init__(self, key: bytes, binding: bytes = b"") -> None:
        self._key, self._binding = key, binding
        self.challenge: Final = _CHALLENGE.pack(_MAGIC, VERSION, 0, os.urandom(NONCE_BYTES))

    @staticmethod
    def check_start(response: bytes) -> None:
        _check_start(response)

    def request(self, response: bytes) -> tuple[Purpose, bytes]:
        """Return what an authentic response is for, and its channel.  Raises AuthenticationError."""
        _check_start(response)
        request, mac = response[: _REQUEST.size], response[_REQUEST.size :]
        expected = _mac(self._key, b"client", self.challenge, request, self._binding)
        if not hmac.compare_digest(mac, expected):
            raise AuthenticationError("it does not have the same secret")
        _, _, purpose, _, channel, _ = _REQUEST.unpack(request)
        if purpose not in Purpose.__members__.values():
            raise AuthenticationError(f"it has a purpose that is not known: {purpose}")
        return Purpose(purpose), channel

    def confirm(self, response: bytes) -> bytes:
        """Return the answer to an authentic response."""
        return _mac(self._key, b"server", self.challenge, response, self._binding)


class ClientHandshake:
    """The end that connected.  Send what ``respond`` returns, then ``check`` the confirmation."""

    def __init__(self, key: bytes, purpose: Purpose, channel: bytes = NO_CHANNEL, binding: bytes = b"") -> None:
        self._key, self._purpose, self._channel, self._binding = key, purpose, channel, binding
        self._challenge = self._response = b""

    def respond(self, challenge: bytes) -> bytes:
        """Raises AuthenticationError."""
        _check_start(challenge)
        request = _REQUEST.pack(_MAGIC, VERSION, self._purpose, 0, self._channel, os.urandom(NONCE_BYTES))
        self._challenge = challenge
        self._response = request + _mac(self._key, b"client", challenge, request, self._binding)
        return self._response

    def check(self, confirmation: bytes) -> None:
        """Raises AuthenticationError."""
        expected = _mac(self._key, b"server", self._challenge, self._response, self._binding)
        if not hmac.compare_digest(confirmation, expected):
            raise AuthenticationError("it does not have the same secret")


def _check_start(message: bytes) -> None:
    """Check magic and version, as far as they are there."""
    if not _MAGIC.startswith(message[:4]):
        raise AuthenticationError(f"it speaks something else: {message[:16]!r}")
    version = message[4:6]
    if len(version) == 2 and (found := int.from_bytes(version, "little")) != VERSION:
        raise AuthenticationError(f"it speaks version {found} of this authentication, not {VERSION}")


def _mac(key: bytes, role: bytes, *parts: bytes) -> bytes:
    """``parts``: of fixed sizes but for the last, so that no two lists of them are the same bytes."""
    return hmac.digest(key, b"lucevisor " + role + b"".join(parts), "sha256")
