"""Makes GGUF headers byte by byte, also such as no writer would make.  Independent of the parser under test."""

from __future__ import annotations

import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
PACK = {
    U8: "<B",
    I8: "<b",
    U16: "<H",
    I16: "<h",
    U32: "<I",
    I32: "<i",
    F32: "<f",
    BOOL: "<?",
    U64: "<Q",
    I64: "<q",
    F64: "<d",
}


def text(value: str | bytes) -> bytes:
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: object) -> bytes:
    return text(value) if kind == STRING else struct.pack(PACK[kind], value)  # type: ignore[arg-type]


def entry(key: str | bytes, kind: int, value: object) -> bytes:
    return text(key) + struct.pack("<I", kind) + scalar(kind, value)


def array(key: str, kind: int, values: list[object]) -> bytes:
    body = b"".join(scalar(kind, v) for v in values)
    return text(key) + struct.pack("<IIQ", ARRAY, kind, len(values)) + body


def tensor(name: str | bytes, extents: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    """``extents`` in GGUF's order, the fastest first."""
    return text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, type_id, offset)


def header(entries: list[bytes], tensors: list[bytes], version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(entries))
    return b"GGUF" + counts + b"".join(entries) + b"".join(tensors)


def padded(head: bytes, n_data: int, alignment: int = 32) -> bytes:
    return head + b"\0" * (-len(head) % alignment) + b"\0" * n_data
