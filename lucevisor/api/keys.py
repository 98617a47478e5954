"""API keys: which bearer tokens are accepted.

Stores digests only, so a memory dump shows no key and all comparisons have equal length.  Invariant: a check compares
with every key, so its time reveals nothing about them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from lucevisor.config import read_api_keys

_SALT: Final = secrets.token_bytes(32)


class ApiKeys:
    """The keys in force.  Without a source no key is required; with one, an empty file accepts no one."""

    def __init__(self, source: Path | Iterable[str] = ()) -> None:
        """Take the keys or the file that holds them; raises ConfigError if it cannot be read."""
        self._file = source if isinstance(source, Path) else None
        self._digests: tuple[bytes, ...] = ()
        self.replace(read_api_keys(source) if isinstance(source, Path) else source)

    def reload(self) -> None:
        """Read the file again; raises ConfigError, and keeps the current keys, if it cannot be read."""
        if self._file is not None:
            self.replace(read_api_keys(self._file))

    def replace(self, keys: Iterable[str]) -> None:
        """Replace the keys; running requests continue."""
        self._digests = tuple(_digest(key) for key in keys)

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return self._file is not None or bool(self._digests)

    def accepts(self, token: str) -> bool:
        """Return whether `token` is one of the keys, in constant time."""
        shown = _digest(token)
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(shown, digest)
        return found


def key_id(token: str) -> str:
    """Return an opaque id for a key, from which the key cannot be recovered; empty for no key."""
    return hmac.digest(_SALT, token.encode("utf-8", "surrogateescape"), "sha256").hex()[:16] if token else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
