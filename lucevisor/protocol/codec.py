"""Codec: messages to frame bytes and back.

Pure: no sockets, no state, no message order or direction.  Invariants: ``encode`` yields the same bytes for every
receiver, so a step plan is encoded once and sent to every stage; ``encode`` reproduces what ``decode`` accepted.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from lucevisor.protocol.errors import LocalProtocolError, RemoteProtocolError
from lucevisor.protocol.frames import MAX_DESCRIPTORS, Header, damaged, pack_header
from lucevisor.protocol.loading import Load
from lucevisor.protocol.messages import KIND_OF, MAX_PAYLOAD_BYTES, MESSAGES, Check, Message, MessageKind, Restore, Save
from lucevisor.protocol.steps import Rows, StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

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
    """Encode header and metadata of a frame; the caller sends the announced ``payload_bytes`` after them.

    LocalProtocolError when the message exceeds a limit or has values of other types than declared.
    """
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
            f"its arenas take {n_descriptors(message)}; a frame carries at most {MAX_DESCRIPTORS} descriptors",
            f"{header.kind.name}.arenas",
            "use fewer stages",
        )
    return message


def n_descriptors(message: Message) -> int:
    if isinstance(message, Load):
        return 2 * sum(arena.connection is None for arena in message.arenas) + bool(message.replay)
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
