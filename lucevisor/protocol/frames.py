"""Framing and codec: the 32-byte header, the size limits, and messages to frame bytes and back.

Invariants: ``encode`` yields the same bytes for every receiver; a header returned by :func:`parse_header` has a valid
checksum, a known kind, and lengths within that kind's limits, so a reader may allocate them. The header is in
docs/protocol.md. The checksums guard against lost and foreign bytes; the payload has none, as kernel sockets do not
flip bits."""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from lucevisor.protocol.errors import LocalProtocolError, RemoteProtocolError
from lucevisor.protocol.loading import Load
from lucevisor.protocol.messages import (
    KIND_OF,
    MAX_PAYLOAD_BYTES,
    MESSAGES,
    PROTOCOL_VERSION,
    Check,
    Message,
    MessageKind,
    Restore,
    Save,
)
from lucevisor.protocol.steps import Rows, StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer


MAGIC = b"LVSR"
HEADER_BYTES = 32
CHECKED_BYTES = 28  # covered by the header checksum
KIND_OFFSET = 6

MAX_DESCRIPTORS = 128
"""Of one frame; the kernel passes at most 253 at once.  A pipeline has one arena per boundary, a model some parts."""

_DIFFER = "supervisor and daemon differ: restart the group after an upgrade"

_HEADER = struct.Struct("<4sHBBQIIII")
_UNCHECKED = struct.Struct("<4sHBBQIII")
assert _HEADER.size == HEADER_BYTES
assert _UNCHECKED.size == CHECKED_BYTES


MAX_FLAGS: dict[MessageKind, int] = {MessageKind.STEP: 255, MessageKind.DRAFT_STEP: 255}
"""Largest flags value per kind.  A Step's flags hold its target stage: one record serves every stage of a daemon."""
POSTED = 128
"""Of a Step's flags: the stage before is still at it, and the region's doorbell says when its rows are there."""


class Frame(msgspec.Struct, frozen=True):
    """One received frame. ``payload`` is a writable view of memory owned by the frame. ``fds`` arrived with the frame,
    are close-on-exec, and the receiver must close them. ``files``: numbers of those that came over TCP (files.py)."""

    kind: MessageKind
    request_id: int
    flags: int
    message: Message
    payload: memoryview
    fds: tuple[int, ...] = ()
    files: tuple[int, ...] = ()


class Header(msgspec.Struct, frozen=True):
    """A header validated by :func:`parse_header`."""

    kind: MessageKind
    flags: int
    request_id: int
    metadata_bytes: int
    payload_bytes: int
    metadata_check: int


# Number -> (kind, max flags, max metadata and payload bytes): one lookup per frame.
_BOUNDS = {
    int(kind): (kind, MAX_FLAGS.get(kind, 0), message.max_metadata_bytes, message.max_payload_bytes)
    for kind, message in MESSAGES.items()
}


def pack_header(kind: MessageKind, flags: int, request_id: int, metadata: bytes, payload_bytes: int) -> bytes:
    """Encode the header of a frame with this metadata.  LocalProtocolError when it is too long."""
    _, _, max_metadata_bytes, max_payload_bytes = _BOUNDS[kind]
    n_bytes = len(metadata)
    if n_bytes > max_metadata_bytes:
        raise _too_long(kind, "metadata", n_bytes, max_metadata_bytes)
    if not 0 <= payload_bytes <= max_payload_bytes:
        raise _too_long(kind, "payload", payload_bytes, max_payload_bytes)
    head = _UNCHECKED.pack(MAGIC, PROTOCOL_VERSION, kind, flags, request_id, n_bytes, payload_bytes, crc32(metadata))
    return head + crc32(head).to_bytes(4, "little")


def parse_header(data: memoryview) -> Header:
    """Read the 32 bytes ``data``. Raises RemoteProtocolError before allocating anything."""
    magic, version, number, flags, request_id, metadata_bytes, payload_bytes, metadata_check, header_check = (
        _HEADER.unpack(data)
    )
    if magic != MAGIC:
        raise foreign_bytes(magic)
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"the peer speaks protocol {version}, this side {PROTOCOL_VERSION}",
            "frame header",
            "install the same lucevisor for the supervisor and for the group's interpreter, then restart the group",
        )
    if crc32(data[:CHECKED_BYTES]) != header_check:
        raise damaged("frame header checksum mismatch", "frame header")
    bounds = _BOUNDS.get(number)
    if bounds is None:
        raise RemoteProtocolError(f"unknown frame kind {number}", "frame header", _DIFFER)
    kind, max_flags, max_metadata_bytes, max_payload_bytes = bounds
    if flags > max_flags:
        raise RemoteProtocolError(f"{kind.name} has undefined flags {flags:#x}", "frame header", _DIFFER)
    if metadata_bytes > max_metadata_bytes or payload_bytes > max_payload_bytes:
        raise RemoteProtocolError(
            f"{kind.name} announces {metadata_bytes} bytes of metadata and {payload_bytes} of payload; the limits are "
            f"{max_metadata_bytes} and {max_payload_bytes}",
            "frame header",
            "restart the group; if it happens again, report it with the daemon's log",
        )
    return Header(kind, flags, request_id, metadata_bytes, payload_bytes, metadata_check)


def foreign_bytes(found: bytes) -> RemoteProtocolError:
    """The error for bytes that do not start a frame, for readers that hold fewer than 32 of them."""
    return RemoteProtocolError(
        f"a frame starts with {MAGIC!r}, found {found!r}",
        "frame header",
        "another writer uses this descriptor, or bytes were lost: restart the group",
    )


def damaged(what: str, where: str) -> RemoteProtocolError:
    """The error for bytes that do not match their checksum."""
    return RemoteProtocolError(what, where, "the stream is damaged and cannot be read further: restart the group")


def _too_long(kind: MessageKind, part: str, n_bytes: int, limit: int) -> LocalProtocolError:
    less = "send less at once: fewer tokens per step, shorter texts"
    advice = f"a {kind.name} carries no payload" if limit == 0 else less
    return LocalProtocolError(f"{part} of {n_bytes} bytes is outside 0 to {limit}", f"{kind.name} to send", advice)


_FLOAT32_BYTES = 4
_MAX_DIMENSIONS = 8  # of a segment; also bounds the work of multiplying its shape

WITH_DESCRIPTORS = frozenset({MessageKind.LOAD, MessageKind.CHECK, MessageKind.SAVE, MessageKind.RESTORE})
"""Kinds whose frames carry descriptors: one per arena and, of a Load, then one that wakes its reader; or the snapshot
file's."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[MessageKind, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(message.record, strict=True) for kind, message in MESSAGES.items()
}


def encode(message: Message, request_id: int = 0, flags: int = 0, payload_bytes: int = 0) -> bytes:
    """Encode header and metadata of a frame; the caller sends the announced ``payload_bytes`` after them. Raises
    LocalProtocolError."""
    try:
        metadata = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(
            f"{type(message).__name__} cannot be encoded: {error}", "encode", "use the declared types of its fields"
        ) from error
    return pack_header(KIND_OF[type(message)], flags, request_id, metadata, payload_bytes) + metadata


def decode(header: Header, metadata: memoryview) -> Message:
    """Decode a frame's metadata.  RemoteProtocolError when it is damaged or does not have the declared types."""
    if crc32(metadata) != header.metadata_check:
        raise damaged(f"{header.kind.name} metadata checksum mismatch", "metadata")
    try:
        message: Message = _DECODERS[header.kind].decode(metadata)
    except (ValueError, RecursionError, OverflowError, MemoryError) as error:  # msgspec's errors are ValueErrors
        raise RemoteProtocolError(
            f"{header.kind.name} cannot be decoded: {error}",
            "metadata",
            "supervisor and daemon differ: restart the group",
        ) from error
    if isinstance(message, StepResult) and (message.segments or header.payload_bytes):
        fault = _segments_fault(message, header.payload_bytes)
        if fault:
            raise RemoteProtocolError(fault, "StepResult.segments", "report it with the daemon's log")
    elif isinstance(message, Rows) and not header.payload_bytes:
        raise RemoteProtocolError("a frame of rows without rows", header.kind.name, "restart the group")
    elif header.kind in WITH_DESCRIPTORS and n_descriptors(message) > MAX_DESCRIPTORS:
        raise RemoteProtocolError(
            f"it comes with {n_descriptors(message)} descriptors; a frame carries at most {MAX_DESCRIPTORS}",
            header.kind.name,
            "use fewer stages, or a model file in fewer parts",
        )
    return message


def n_descriptors(message: Message) -> int:
    if isinstance(message, Load):
        n_arenas = sum(arena.connection is None for arena in message.arenas)
        return 2 * n_arenas + bool(message.replay) + len(message.offered)
    if isinstance(message, Check):
        return len(message.arenas)
    return 1 if isinstance(message, Save | Restore) else 0


def byte_views(payload: Iterable[Buffer]) -> list[memoryview]:
    """Flat byte views of C-contiguous buffers (numpy arrays too), without copies; empty buffers are skipped."""
    views = []
    for part in payload:
        view = memoryview(part)
        if view.nbytes == 0:
            continue
        views.append(view if view.ndim == 1 and view.format == "B" else view.cast("B"))
    return views


def payload_segments(result: StepResult, payload: memoryview) -> list[tuple[str, tuple[int, ...], memoryview[float]]]:
    """Split the payload of a StepResult into its float32 arrays: (name, shape, flat view with format ``f``)."""
    segments = []
    start = 0
    for name, shape in result.segments:
        stop = start + _FLOAT32_BYTES * prod(shape)
        segments.append((name, tuple(shape), payload[start:stop].cast("f")))
        start = stop
    return segments


def _segments_fault(result: StepResult, payload_bytes: int) -> str:
    n_bytes = 0
    for name, shape in result.segments:
        if len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0:
            return (
                f"segment {name[:40]!r} has a shape of {len(shape)} dimensions starting with {shape[:_MAX_DIMENSIONS]}"
            )
        n_bytes += _FLOAT32_BYTES * prod(shape)
        if n_bytes > MAX_PAYLOAD_BYTES:
            break
    return "" if n_bytes == payload_bytes else f"the segments take {n_bytes} bytes, the payload has {payload_bytes}"
