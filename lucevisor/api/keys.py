"""API keys: which bearer tokens are let in.

Keeps digests only, so a dump of this object shows no key and all comparisons are of equal length.  Invariant: a check
compares with every key, whichever matches, so its time tells nothing about the keys.
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
    """The set of keys in force.  With no source nobody is asked for a key; with one, an empty file lets nobody in."""

    def __init__(self, source: Path | Iterable[str] = ()) -> None:
        """Take the keys themselves or the file they are in; raises ConfigError for a file that cannot be read."""
        self._file = source if isinstance(source, Path) else None
        self._digests: tuple[bytes, ...] = ()
        self.replace(read_api_keys(source) if isinstance(source, Path) else source)

    def reload(self) -> None:
        """Read the file again; raises ConfigError, and leaves the keys as they are, when it cannot be read."""
        if self._file is not None:
            self.replace(read_api_keys(self._file))

    def replace(self, keys: Iterable[str]) -> None:
        """Put other keys in force; running requests go on."""
        self._digests = tuple(_digest(key) for key in keys)

    @property
    def required(self) -> bool:
        """Whether a request must show a key."""
        return self._file is not None or bool(self._digests)

    def accepts(self, token: str) -> bool:
        """Return whether `token` is one of the keys, in a time that does not depend on which."""
        shown = _digest(token)
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(shown, digest)
        return found


def key_id(token: str) -> str:
    """Return what stands for a key where its requests are told apart: nobody finds the key by it."""
    return hmac.digest(_SALT, token.encode("utf-8", "surrogateescape"), "sha256").hex()[:16] if token else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
