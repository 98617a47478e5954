"""The snapshot file: a header followed by the tensors of one prefix slot, as safetensors.

docs/snapshot-format.md is the specification.  Pure: numbers and bytes, no files, no clock; tensor checksums are opaque
text.  Invariant: :func:`parse` accepts only headers that :func:`pack` wrote, with every bit intact, and whose tensors
fill the file to its last byte without gaps.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from math import isfinite
from typing import Any

import msgspec

from lucevisor.kv.residency import PagedOut
from lucevisor.model.values import PAGE_TOKENS, Dtype
from lucevisor.protocol.messages import SnapshotTensor
from lucevisor.snapshots.layout import (
    DRAFT,
    ITEM_BYTES,
    TARGET,
    Fault,
    NextToken,
    SlotRecord,
    SnapshotError,
    SnapshotHeader,
    StateModel,
    pack_tokens,
    slot_tensors,
    tensor_bytes,
)

FORMAT = "lucevisor-snapshot"
FORMAT_VERSION = 2

LENGTH_BYTES = 8
DATA_ALIGNMENT = 4096
"""Tensors start at a multiple of it, so that mapping the file gives whole memory pages."""
MAX_HEADER_BYTES = 64 << 20
MAX_TOKENS = 1 << 24
"""More than any context; bounds the size of an unpacked header."""
NO_CHECKSUM = "0" * 16
HEADER_BYTES_PER_TOKEN = 7
"""At most: four bytes that may not compress (zlib then adds 5 in 16,383), as base64, and a page's record."""

_MAX_RECORD_BYTES = 4096
"""At most, of a record of the next token, the time and the number of tokens."""

_CHECK_DIGITS = 64
_START = b'{"__metadata__":{"header_check":"'
_CHECK_AT = LENGTH_BYTES + len(_START)
MIN_HEADER_BYTES = len(_START) + _CHECK_DIGITS + 4


# ---- layout


def lay_out(model: StateModel, slot: SlotRecord) -> SnapshotHeader:
    """Lay out the file of a slot, without checksums yet.  Raises ValueError without tokens."""
    n = len(slot.tokens)
    if not 0 < n <= MAX_TOKENS:
        raise ValueError(f"a snapshot of {n} tokens; give 1 to {MAX_TOKENS}")
    tensors = slot_tensors(model.layers, n, model.kv_dtype)
    draft = model.draft if slot.with_draft else None
    if draft is not None:
        tensors += slot_tensors(draft.layers, n, model.kv_dtype, draft=True)
        tensors.sort(key=lambda t: -ITEM_BYTES[t.dtype])  # stable: those of a drafter come last of their size
    snapshot = SnapshotHeader(
        fingerprint=model.fingerprint,
        architecture=model.architecture,
        model=model.name,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        packed_tokens=pack_tokens(slot.tokens),
        created_s=slot.created_s,
        next_token=slot.next_token,
        tensors=_placed(tensors, 0),
        checksums={t.name: NO_CHECKSUM for t in tensors},
        data_start=0,
        draft_fingerprint=draft.fingerprint if draft is not None else "",
        paged_out=slot.paged_out,
    )
    start = -(-(LENGTH_BYTES + len(_json(snapshot))) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    return replace(snapshot, tensors=_placed(tensors, start), data_start=start)


def max_header_bytes(model: StateModel) -> int:
    """Return the most bytes in front of a model's tensors, apart from HEADER_BYTES_PER_TOKEN for each token."""
    longest = lay_out(model, SlotRecord((0,), 0.0, with_draft=True))
    tensors = slot_tensors(model.layers, MAX_TOKENS, model.kv_dtype)  # with the longest numbers
    if model.draft is not None:
        tensors += slot_tensors(model.draft.layers, MAX_TOKENS, model.kv_dtype, draft=True)
    header = replace(longest, tensors=_placed(tensors, 0), data_start=0)
    return LENGTH_BYTES + len(_json(header)) + _MAX_RECORD_BYTES + DATA_ALIGNMENT


def _placed(tensors: Sequence[SnapshotTensor], start: int) -> tuple[SnapshotTensor, ...]:
    placed, at = [], start
    for t in tensors:
        placed.append(msgspec.structs.replace(t, offset=at))
        at += t.n_bytes
    return tuple(placed)


# ---- header to bytes


def pack(snapshot: SnapshotHeader) -> bytes:
    """Return the first ``data_start`` bytes of the file: length, JSON with its ``header_check``, padding."""
    text = _json(snapshot).ljust(snapshot.data_start - LENGTH_BYTES)
    whole = bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    if len(whole) != snapshot.data_start:
        raise ValueError(f"the header takes {len(whole)} bytes instead of {snapshot.data_start}")
    whole[_CHECK_AT : _CHECK_AT + _CHECK_DIGITS] = header_check(whole).encode("ascii")
    return bytes(whole)


def header_check(header: bytes | bytearray) -> str:
    """Return the sha256 of length field, JSON and padding, with zeros for the digits of the check itself."""
    digest = sha256(header[:_CHECK_AT])
    digest.update(b"0" * _CHECK_DIGITS)
    digest.update(header[_CHECK_AT + _CHECK_DIGITS :])
    return digest.hexdigest()


def _json(s: SnapshotHeader) -> bytes:
    metadata = {
        "header_check": "0" * _CHECK_DIGITS,  # first, so that its offset is fixed
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "model_fingerprint": s.fingerprint,
        "model_architecture": s.architecture,
        "model_name": s.model,
        "draft_fingerprint": s.draft_fingerprint,
        "page_tokens": str(PAGE_TOKENS),
        "dtype": s.dtype.value,
        "kv_dtype": s.kv_dtype.value,
        "n_tokens": str(s.n_tokens),
        "tokens": base64.b64encode(zlib.compress(s.packed_tokens, 6)).decode("ascii"),
        "created_s": repr(float(s.created_s)),
        "next_token": _text(s.next_token) if s.next_token is not None else "",
        "first_positions": _text({t.name: t.first for t in s.tensors if t.first}),
        "checksums": _text({t.name: s.checksums[t.name] for t in s.tensors}),
        "paged_out": _text(s.paged_out) if s.paged_out is not None else "",
    }
    rows: dict[str, Any] = {"__metadata__": metadata}
    for t in s.tensors:
        at = t.offset - s.data_start
        rows[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (at, at + t.n_bytes)}
    text = msgspec.json.encode(rows)
    assert text.startswith(_START)
    return text


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode("utf-8")


# ---- bytes to header


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def header_bytes(length: bytes, file_bytes: int) -> int:
    """Return how many bytes of the file to read for :func:`parse`; ``length`` is its first 8 bytes.

    Raises SnapshotError if a file of ``file_bytes`` cannot have such a header.
    """
    if len(length) < LENGTH_BYTES or file_bytes < LENGTH_BYTES + MIN_HEADER_BYTES:
        raise SnapshotError(Fault.TRUNCATED, "header length", f"the file has {file_bytes} bytes, fewer than any header")
    n = int.from_bytes(length, "little")
    if not MIN_HEADER_BYTES <= n <= MAX_HEADER_BYTES:
        raise SnapshotError(Fault.DAMAGED, "header length", f"{n} bytes is not the length of a header")
    if LENGTH_BYTES + n > file_bytes:
        raise SnapshotError(Fault.TRUNCATED, "header length", f"{n} bytes, the file has {file_bytes}")
    return LENGTH_BYTES + n


def parse(header: bytes, file_bytes: int) -> SnapshotHeader:
    """Parse as many bytes as :func:`header_bytes` said.  Raises SnapshotError naming the field."""
    if not header.startswith(_START, LENGTH_BYTES):
        raise SnapshotError(Fault.FOREIGN, "start of the header", "does not start a snapshot: foreign or damaged")
    if header[_CHECK_AT : _CHECK_AT + _CHECK_DIGITS] != header_check(header).encode("ascii"):
        raise SnapshotError(Fault.DAMAGED, "header_check", "does not match the header")
    try:
        rows = msgspec.json.decode(header[LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(rows.pop("__metadata__"), type=dict[str, str])
        tensors = {name: msgspec.json.decode(row, type=_Row) for name, row in rows.items()}
    except (ValueError, RecursionError) as error:
        raise SnapshotError(Fault.FOREIGN, "header", f"is not a snapshot header: {error}") from error
    return _Parser(metadata, tensors, len(header), file_bytes).snapshot()


class _Parser:
    def __init__(self, metadata: Mapping[str, str], rows: Mapping[str, _Row], data_start: int, file_bytes: int) -> None:
        self.metadata, self.rows, self.data_start, self.file_bytes = metadata, rows, data_start, file_bytes

    def snapshot(self) -> SnapshotHeader:
        self._check_version()
        firsts = self._mapping("first_positions", int)
        checksums = self._mapping("checksums", str)
        if set(checksums) != set(self.rows):
            raise self._foreign("checksums", "do not name the file's tensors")
        tensors = self._tensors(firsts)
        end = self.data_start + sum(t.n_bytes for t in tensors)
        if self.file_bytes != end:
            fault = Fault.TRUNCATED if self.file_bytes < end else Fault.DAMAGED
            raise SnapshotError(fault, "file length", f"{self.file_bytes} bytes, the header says {end}")
        return SnapshotHeader(
            fingerprint=self._get("model_fingerprint"),
            architecture=self._get("model_architecture"),
            model=self._get("model_name"),
            dtype=self._dtype("dtype"),
            kv_dtype=self._dtype("kv_dtype"),
            packed_tokens=self._tokens(),
            created_s=self._created(),
            next_token=self._next_token(),
            tensors=tensors,
            checksums=checksums,
            data_start=self.data_start,
            draft_fingerprint=self.metadata.get("draft_fingerprint", ""),
            paged_out=self._paged_out(),
        )

    def _foreign(self, key: str, reason: str) -> SnapshotError:
        return SnapshotError(Fault.FOREIGN, key, reason)

    def _get(self, key: str) -> str:
        try:
            return self.metadata[key]
        except KeyError:
            raise self._foreign(key, "is missing") from None

    def _number(self, key: str, most: int) -> int:
        text = self._get(key)
        if not (text.isascii() and text.isdigit() and len(text) <= 12 and 0 < int(text) <= most):
            raise self._foreign(key, f"is {text[:40]!r}, expected 1 to {most}")
        return int(text)

    def _check_version(self) -> None:
        if self._get("format") != FORMAT:
            raise self._foreign("format", f"is {self._get('format')[:40]!r}, not {FORMAT!r}")
        version = self._number("format_version", 1 << 31)
        if version < FORMAT_VERSION:
            reason = (
                f"is {version}: made by an earlier version of lucevisor, whose fingerprint did not cover all weights"
            )
            raise SnapshotError(Fault.OLDER, "format_version", reason)
        if version > FORMAT_VERSION:
            raise SnapshotError(Fault.NEWER, "format_version", f"is {version}, this lucevisor reads {FORMAT_VERSION}")
        if self._number("page_tokens", 1 << 20) != PAGE_TOKENS:
            raise SnapshotError(Fault.MISFIT, "page_tokens", f"is {self._get('page_tokens')}, ours is {PAGE_TOKENS}")

    def _mapping(self, key: str, kind: type) -> dict[str, Any]:
        try:
            return msgspec.json.decode(self._get(key), type=dict[str, kind])  # type: ignore[valid-type]
        except ValueError as error:
            raise self._foreign(key, f"is not a JSON object: {error}") from error

    def _dtype(self, key: str) -> Dtype:
        try:
            return Dtype(self._get(key))
        except ValueError:
            raise self._foreign(key, f"is {self._get(key)[:40]!r}, an unknown number format") from None

    def _tokens(self) -> bytes:
        n = self._number("n_tokens", MAX_TOKENS)
        try:
            unpacker = zlib.decompressobj()
            packed = unpacker.decompress(base64.b64decode(self._get("tokens"), validate=True), 4 * n + 1)
        except (ValueError, zlib.error) as error:
            raise self._foreign("tokens", f"cannot be unpacked: {error}") from error
        if len(packed) != 4 * n:
            raise self._foreign("tokens", f"are not {n}, as n_tokens says")
        return packed

    def _created(self) -> float:
        try:
            created = float(self._get("created_s"))
        except ValueError:
            raise self._foreign("created_s", "is not a number") from None
        if not isfinite(created):
            raise self._foreign("created_s", "is not a time")
        return created

    def _next_token(self) -> NextToken | None:
        text = self._get("next_token")
        try:
            return msgspec.json.decode(text, type=NextToken) if text else None
        except (ValueError, RecursionError) as error:
            raise self._foreign("next_token", f"is not a token record: {error}") from error

    def _paged_out(self) -> PagedOut | None:
        text = self.metadata.get("paged_out", "")
        try:
            found = msgspec.json.decode(text, type=PagedOut) if text else None
        except (ValueError, RecursionError) as error:
            raise self._foreign("paged_out", f"is not a record of pages: {error}") from error
        if found is None:
            return None
        if not found.entries:
            raise self._foreign("paged_out", "names no pages")
        n_pages = self._number("n_tokens", MAX_TOKENS) // PAGE_TOKENS
        ascending = all(a < b for a, b in pairwise(found.entries))
        if not ascending or not all(0 < entry < n_pages for entry in found.entries) or len(found.scores) > n_pages:
            raise self._foreign("paged_out", f"names pages that are not among the {n_pages} there are")
        return found

    def _tensors(self, firsts: Mapping[str, int]) -> tuple[SnapshotTensor, ...]:
        found, at = [], 0
        for name, row in sorted(self.rows.items(), key=lambda item: item[1].data_offsets):
            start, stop = row.data_offsets
            if row.dtype not in ITEM_BYTES or min(row.shape, default=0) < 0 or len(row.shape) > 8:
                raise self._foreign(f"tensor {name}", f"dtype {row.dtype[:20]!r}, shape {list(row.shape)[:8]}")
            if start != at or stop - start != tensor_bytes(row.dtype, row.shape):
                raise self._foreign(f"tensor {name}", f"bytes {start} to {stop} do not follow {at} or fit its shape")
            layer, kind, draft = _layer_and_kind(name)
            first, offset = firsts.get(name, 0), self.data_start + at
            found.append(SnapshotTensor(name, layer, kind, row.dtype, row.shape, offset, stop - start, first, draft))
            at = stop
        return tuple(found)


def _layer_and_kind(name: str) -> tuple[int, str, bool]:
    """Return layer, kind and whether it is the drafter's: ``layers.12.k`` -> (12, "k", False)."""
    head, _, rest = name.partition(".")
    number, _, kind = rest.partition(".")
    if head not in (TARGET, DRAFT) or not (number.isascii() and number.isdigit() and len(number) < 6) or not kind:
        raise SnapshotError(Fault.FOREIGN, f"tensor {name[:80]}", "is not a tensor of any layer")
    return int(number), kind, head == DRAFT
