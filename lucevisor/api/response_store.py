"""Finished responses of the Responses API, kept in memory as JSON: the least recently used go first."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from lucevisor.api.prepared import STORED_RESPONSES

_PREVIOUS: Final = re.compile(rb'"previous_response_id"\s*:\s*"(resp_[0-9a-f]{1,64})"')
_REFERENCE: Final = re.compile(rb'\{[^{}]{0,100}"item_reference"[^{}]{0,100}\}')
_ITEM: Final = re.compile(rb'"[a-z]{2,3}_([0-9a-f]{1,64})[0-9]{2}"')
"""Ids of output items hold that of their response."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, and the items of its conversation, its own included."""

    body: bytes
    turns: tuple[bytes, ...]
    key_id: str

    @property
    def n_bytes(self) -> int:
        return len(self.body) + sum(map(len, self.turns))


class ResponseStore:
    """The store.  It may be filled from several threads."""

    def __init__(self, n: int, n_bytes: int) -> None:
        self._n, self._n_bytes = n, n_bytes
        self._used_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = Lock()

    def put(self, response_id: str, response: StoredResponse) -> None:
        with self._lock:
            if response.n_bytes > self._n_bytes:
                return
            self._stored[response_id] = response
            self._used_bytes += response.n_bytes
            while len(self._stored) > self._n or self._used_bytes > self._n_bytes:
                self._used_bytes -= self._stored.popitem(last=False)[1].n_bytes

    def get(self, response_id: str, key_id: str) -> StoredResponse | None:
        with self._lock:
            response = self._stored.get(response_id)
            if response is None or response.key_id != key_id:
                return None
            self._stored.move_to_end(response_id)
            return response

    def delete(self, response_id: str, key_id: str) -> bool:
        with self._lock:
            response = self._stored.get(response_id)
            if response is None or response.key_id != key_id:
                return False
            self._used_bytes -= self._stored.pop(response_id).n_bytes
            return True

    async def named_in(self, body: Sequence[bytes], key_id: str) -> dict[str, StoredResponse]:
        """Return the responses that a request's body may refer to, found without decoding it."""
        found: dict[str, StoredResponse] = {}
        before, n_looked_up = b"", 0
        for part in body if self._stored else ():
            text = before + part
            for name in _names_in(text):
                if (response := self.get(name, key_id)) is not None:
                    found[name] = response
                n_looked_up += 1
                if n_looked_up == 64:  # a body names one
                    return found
            before = text[-256:]  # more than a match is long
            await asyncio.sleep(0)  # a long body has many parts
        return found


def _names_in(text: bytes) -> Iterator[str]:
    for match in _PREVIOUS.finditer(text):
        yield match[1].decode()
    for reference in _REFERENCE.finditer(text) if b'"item_reference"' in text else ():
        if item := _ITEM.search(reference[0]):
            yield f"resp_{item[1].decode()}"


def with_stored(body: list[bytes], responses: Mapping[str, StoredResponse]) -> int:
    """Add the conversations to a request's body, as its first member; return how many bytes that adds."""
    start = body[0].lstrip(b" \t\r\n") if body else b""
    if not responses or not start.startswith(b"{"):
        return 0
    members = b",".join(
        b'"%s":[%s]' % (name.encode(), b",".join(response.turns)) for name, response in responses.items()
    )
    added = b'{"%s":{%s},' % (STORED_RESPONSES.encode(), members)
    n_before = len(body[0])
    body[:1] = [added, start[1:]]
    return len(added) + len(start) - 1 - n_before
