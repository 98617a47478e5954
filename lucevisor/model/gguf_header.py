"""GGUF header parser: metadata and tensor table.

Every count and length is checked against the rest of the file and the limits below before anything is allocated, so a
hostile header costs a small multiple of its own size.  Source: GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field
from itertools import pairwise

from gguf.constants import GGUFValueType

from lucevisor.model.quant_types import TYPES, GgmlType

MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 4
MAX_KEYS = 1 << 14  # published files have about 50
MAX_ARRAY_VALUES = 1 << 22  # over all arrays; a vocabulary of 262144 tokens with its merges has 1.3 million
MAX_NAME_BYTES = 255  # ggml allows 64, some converters write more
MAX_HEADER_BYTES = 128 << 20  # a vocabulary of 262,144 tokens with its merges has 15 MB
_SHOWN_CHARS = 150

Value = bool | int | float | str | list["Value"] | list[int] | list[float] | list[str] | list[bool]


def _shorten(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...{text[-_SHOWN_CHARS:]}"


class GgufError(ValueError):
    """``where`` names the key, tensor or offset."""

    def __init__(self, file: str, where: str, reason: str) -> None:
        where, reason = _shorten(where), _shorten(reason)
        super().__init__(f"{file}: {where}: {reason}")
        self.file, self.where, self.reason = file, where, reason


class TruncatedHeaderError(GgufError):
    """The data ends inside the header: parse again with more."""


class TruncatedFileError(GgufError):
    """The file ends before its header or its tensors do."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """``shape`` is row-major (the reverse of GGUF's order), ``offset`` counts from its file's start."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    part: int = 0  # index of the file of a split model


@dataclass(frozen=True, slots=True)
class GgufHeader:
    version: int
    metadata: dict[str, Value] = field(repr=False)
    tensors: dict[str, TensorInfo] = field(repr=False)
    data_offset: int


_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_SCALARS = {kind.value: (f"<{code}", struct.calcsize(f"<{code}")) for kind, code in _FORMATS.items()}
_ARRAY_CODES = {kind.value: code.replace("?", "B") for kind, code in _FORMATS.items()}  # array has no code for bool
_U64 = struct.Struct("<Q")
_STRING, _ARRAY = GGUFValueType.STRING.value, GGUFValueType.ARRAY.value


def _least_bytes(kind: int) -> int:
    return _SCALARS[kind][1] if kind in _SCALARS else 8 if kind == _STRING else 12


class _HeaderReader:
    def __init__(self, data: memoryview, file: str, file_bytes: int) -> None:
        self.data, self.file, self.at = data[:MAX_HEADER_BYTES], file, 0
        self.whole = file_bytes <= len(self.data)
        self.n_array_values = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def fail(self, where: str, reason: str) -> GgufError:
        return GgufError(self.file, f"{where} (byte {self.at})", reason)

    def short(self, where: str, what: str) -> GgufError:
        end = f"of the {MAX_HEADER_BYTES} allowed for a header"
        if self.whole:
            end = "in the file: it is truncated or damaged, download it again"
        error = self.fail(where, f"{what}, but only {self.left} bytes are left {end}")
        if self.whole:
            return TruncatedFileError(error.file, error.where, error.reason)
        return (
            error if len(self.data) == MAX_HEADER_BYTES else TruncatedHeaderError(error.file, error.where, error.reason)
        )

    def scalar(self, code: str, size: int, where: str) -> int | float | bool:
        if size > self.left:
            raise self.short(where, f"a value of {size} bytes")
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += size
        return value  # type: ignore[no-any-return]

    def u32(self, where: str) -> int:
        return int(self.scalar("<I", 4, where))

    def u64(self, where: str) -> int:
        return int(self.scalar("<Q", 8, where))

    def text(self, where: str, limit: int | None = None) -> str:
        n = self.u64(where)
        if limit is not None and n > limit:
            raise self.fail(where, f"a string of {n} bytes, at most {limit} are allowed")
        if n > self.left:
            raise self.short(where, f"a string of {n} bytes")
        raw = self.data[self.at : self.at + n].tobytes()
        self.at += n
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            if limit is not None:
                raise self.fail(where, "the name is not UTF-8") from None
            return raw.decode("utf-8", errors="surrogateescape")

    def texts(self, n: int, where: str) -> list[Value]:
        """The next ``n`` strings; a vocabulary has 250,000, so the loop calls no more than it must."""
        at, out, unpack = self.at, list[Value](), _U64.unpack_from
        data = self.data[at:].tobytes()
        start, end = 0, len(data)
        for _ in range(n):
            self.at = at + start
            if start + 8 > end:
                raise self.short(where, "a value of 8 bytes")
            (size,) = unpack(data, start)
            start += 8
            if size > end - start:
                self.at = at + start
                raise self.short(where, f"a string of {size} bytes")
            out.append(data[start : start + size].decode("utf-8", "surrogateescape"))  # token texts of old files
            start += size
        self.at = at + start
        return out

    def value(self, kind: int, where: str, depth: int = 0) -> Value:
        if kind in _SCALARS:
            return self.scalar(*_SCALARS[kind], where)
        if kind == _STRING:
            return self.text(where)
        if kind == _ARRAY and depth < 2:
            return self.array(where, depth)
        raise self.fail(where, f"unknown metadata type {kind}")

    def array(self, where: str, depth: int) -> Value:
        kind, n = self.u32(where), self.u64(where)
        self.n_array_values += n
        if self.n_array_values > MAX_ARRAY_VALUES and n * _least_bytes(kind) <= self.left:
            raise self.fail(where, f"arrays of {self.n_array_values} values, at most {MAX_ARRAY_VALUES} are allowed")
        if kind in _SCALARS:
            size = _SCALARS[kind][1]
            if n * size > self.left:
                raise self.short(where, f"an array of {n} values")
            out = array(_ARRAY_CODES[kind], self.data[self.at : self.at + n * size].tobytes())
            self.at += n * size
            return [bool(v) for v in out] if kind == 7 else out.tolist()
        if n * _least_bytes(kind) > self.left:
            raise self.short(where, f"an array of {n} values")
        if kind == _STRING:
            return self.texts(n, where)
        return [self.value(kind, where, depth + 1) for _ in range(n)]


def parse(data: memoryview, file: str, file_bytes: int | None = None) -> GgufHeader:
    """Parse the header at the start of ``data``.  ``file_bytes``: size of the whole file, which must contain all
    tensors.

    Raises GgufError; TruncatedHeaderError when more data could help.
    """
    total = len(data) if file_bytes is None else file_bytes
    reader = _HeaderReader(data, file, total)
    magic = data[:4].tobytes()
    if magic != b"GGUF":
        raise GgufError(file, "byte 0", f"starts with {magic!r}, not b'GGUF': this is not a GGUF file")
    reader.at = 4
    version = reader.u32("version")
    if version in (2 << 24, 3 << 24):
        raise reader.fail("version", "a big-endian GGUF file: convert it to little-endian")
    if version not in (2, 3):
        raise reader.fail("version", f"GGUF version {version} is not supported, only 2 and 3: convert the file again")
    n_tensors, n_values = reader.u64("tensor count"), reader.u64("metadata count")
    if n_tensors > MAX_TENSORS or n_tensors * 24 > reader.left:
        raise reader.short("tensor count", f"{n_tensors} tensors")
    if n_values * 13 > reader.left:
        raise reader.short("metadata count", f"{n_values} metadata values")
    if n_values > MAX_KEYS:
        raise reader.fail("metadata count", f"{n_values} metadata values, at most {MAX_KEYS} are allowed")
    metadata: dict[str, Value] = {}
    for i in range(n_values):
        key = reader.text(f"metadata key {i}", 65535)  # the specification's own limit
        if key in metadata:
            raise reader.fail(f"metadata key {key!r}", "appears twice")
        metadata[key] = reader.value(reader.u32(f"type of {key!r}"), f"metadata value {key!r}")
    return _tensor_table(reader, version, metadata, n_tensors, total)


def _tensor_table(
    reader: _HeaderReader, version: int, metadata: dict[str, Value], n_tensors: int, total: int
) -> GgufHeader:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise reader.fail("metadata value 'general.alignment'", f"{alignment!r} is not a power of two up to 1048576")
    rows: list[TensorInfo] = []
    names: set[str] = set()
    for i in range(n_tensors):
        info = _tensor_row(reader, i)
        if info.name in names:
            raise reader.fail(f"tensor {info.name!r}", "appears twice")
        if info.offset % alignment:
            raise reader.fail(
                f"tensor {info.name!r}", f"offset {info.offset} is not a multiple of the alignment {alignment}"
            )
        names.add(info.name)
        rows.append(info)
    start = (reader.at + alignment - 1) // alignment * alignment
    check_overlap(reader.file, rows)
    end = max((start + info.offset + info.n_bytes for info in rows), default=0)
    if end > total:
        cut = next(info.name for info in rows if start + info.offset + info.n_bytes > total)
        missing = f"{end - total} of {end} bytes are missing, the file is truncated: download it again"
        raise TruncatedFileError(reader.file, f"tensor {cut!r}", missing)
    tensors = {
        info.name: TensorInfo(info.name, info.kind, info.shape, start + info.offset, info.n_bytes) for info in rows
    }
    return GgufHeader(version, metadata, tensors, start)


def check_overlap(file: str, rows: list[TensorInfo]) -> None:
    """Refuse overlapping tensors, which would load garbage silently.  Raises GgufError."""
    by_offset = sorted(rows, key=lambda row: row.offset)
    for before, after in pairwise(by_offset):
        if before.offset + before.n_bytes > after.offset:
            raise GgufError(
                file,
                f"tensor {after.name!r}",
                f"its data overlaps that of {before.name!r}: the file is damaged, download it again",
            )


def _tensor_row(reader: _HeaderReader, i: int) -> TensorInfo:
    name = reader.text(f"name of tensor {i}", MAX_NAME_BYTES)
    where = f"tensor {name!r}"
    n_dimensions = reader.u32(where)
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise reader.fail(where, f"{n_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    extents = [reader.u64(where) for _ in range(n_dimensions)]
    n = 1
    for extent in extents:
        if extent <= 0:
            raise reader.fail(where, f"dimension of {extent}")
        n *= extent
        if n >= 1 << 62:
            raise reader.fail(where, f"dimensions {extents} overflow")
    type_id = reader.u32(where)
    kind = TYPES.get(type_id)
    if kind is None:
        raise reader.fail(where, f"unknown tensor type {type_id}: the file is newer than this version, or damaged")
    if extents[0] % kind.block_elements:
        raise reader.fail(
            where,
            f"rows of {extents[0]} numbers are not a multiple of the {kind.name} block size {kind.block_elements}",
        )
    n_bytes = n // kind.block_elements * kind.block_bytes
    return TensorInfo(name, kind, tuple(reversed(extents)), reader.u64(where), n_bytes)
