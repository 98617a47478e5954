"""API keys: accepted bearer tokens and their owners. Digests are compared with every key, in constant time."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from lucevisor.config import ApiKey

_SALT: Final = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a request: opaque ids of the key, and of the key or address for fair scheduling; the key's name."""

    id: str = ""
    name: str = ""
    share: str = ""

    @classmethod
    def of_key(cls, text: str, name: str) -> Caller:
        opaque = _opaque(text)
        return cls(opaque, name, opaque)

    @classmethod
    @functools.lru_cache(1024)
    def of_address(cls, address: str) -> Caller:
        """Return the caller of an address.  An IPv6 address counts as its /64 network, which belongs to one client."""
        with contextlib.suppress(ValueError):
            ip = ipaddress.ip_address(address.partition("%")[0])
            if ip.version == 6:
                mapped = ip.ipv4_mapped
                address = str(mapped or ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
        return cls(share=_opaque(f"address {address}"))


class ApiKeys:
    """The accepted keys.  Without any, no key is required."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._known: tuple[tuple[bytes, str], ...] = ()
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replace the keys; running requests continue."""
        self._known = tuple((_digest(item.key), item.name) for item in keys)

    @property
    def required(self) -> bool:
        return bool(self._known)

    def caller(self, token: str) -> Caller | None:
        """Return the caller whose key is `token`, None if it is not a key; in constant time."""
        shown = _digest(token)
        found: str | None = None
        for digest, name in self._known:
            if hmac.compare_digest(shown, digest):
                found = name
        return None if found is None else Caller.of_key(f"name {found}" if found else f"key {token}", found)


def _opaque(text: str) -> str:
    return hmac.digest(_SALT, text.encode("utf-8", "surrogateescape"), "sha256").hex()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
