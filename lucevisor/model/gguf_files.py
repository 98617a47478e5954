"""A GGUF model on disk: one file or the parts of a split one, as one tensor table.

Files are read with pread, never mapped: touching a mapping of a truncated file kills the process with SIGBUS.
"""

from __future__ import annotations

import os
import re
import stat
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from lucevisor.model.gguf_header import (
    MAX_HEADER_BYTES,
    GgufError,
    GgufHeader,
    TensorInfo,
    TruncatedFileError,
    TruncatedHeaderError,
    Value,
    parse,
)
from lucevisor.model.values import FileIdentity, identity_of

_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<suffix>gguf|safetensors)$")
_HEADER_READS = (1 << 20, 16 << 20, MAX_HEADER_BYTES)
_CUT = "unexpected end of file: it was truncated after it was opened; download it again"


class OpenFile:
    """A file opened for reading, closed when unreferenced."""

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: opening a pipe without a writer would block forever
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._fd)
        self.path, self._header, self._header_bytes = path, "", 0
        status = self._opened = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise GgufError(str(path), "file", "is not a regular file: name a model file")
        self.n_bytes = status.st_size

    def fileno(self) -> int:
        return self._fd

    @property
    def header_bytes(self) -> int:
        return self._header_bytes

    @property
    def identity(self) -> FileIdentity:
        return identity_of(self._opened, self._header)

    def identity_now(self) -> FileIdentity:
        """Identity now, assuming the parsed header."""
        return identity_of(os.fstat(self._fd), self._header)

    def has_its_header(self) -> bool:
        return sha256(self.read(0, self._header_bytes)).hexdigest() == self._header

    def read(self, start: int, n: int) -> bytes:
        """``n`` bytes from ``start``; fewer at the end of the file.  Raises OSError."""
        parts = []
        while n > 0 and (part := os.pread(self._fd, n, start)):
            parts.append(part)
            start, n = start + len(part), n - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def keep_header(self, header: bytes | memoryview) -> None:
        self._header_bytes, self._header = len(header), sha256(header).hexdigest()

    def header(self) -> GgufHeader:
        """Parse the GGUF header.  Raises GgufError."""
        if self.n_bytes < 24:
            raise TruncatedFileError(
                str(self.path), "byte 0", "the file is too short to be a GGUF file: download it again"
            )
        for n in _HEADER_READS:
            data = self.read(0, min(n, self.n_bytes))
            try:
                header = parse(memoryview(data), str(self.path), max(len(data), self.n_bytes))
            except TruncatedHeaderError:
                if len(data) < min(n, self.n_bytes):
                    raise TruncatedFileError(str(self.path), f"byte {len(data)}", _CUT) from None
                continue
            self.keep_header(memoryview(data)[: header.data_offset])
            return header
        raise AssertionError("the last read covers the longest header allowed")


@dataclass(frozen=True)
class GgufFiles:
    """Headers and open files of all parts; ``metadata`` is that of the first part."""

    paths: tuple[Path, ...]
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    parts: tuple[OpenFile, ...]

    def read(self, tensor: TensorInfo, start: int = 0, n: int | None = None) -> bytes:
        """``n`` bytes (default: all) of the tensor as stored, from ``start``.  Raises GgufError, OSError."""
        n = max(0, tensor.n_bytes - start if n is None else min(n, tensor.n_bytes - start))
        raw = self.parts[tensor.part].read(tensor.offset + start, n)
        if len(raw) < n:
            raise GgufError(str(self.paths[tensor.part]), f"tensor {tensor.name!r}", _CUT)
        return raw

    def where(self, tensor: TensorInfo) -> str:
        """Name a tensor and its file, for messages."""
        return f"{self.paths[tensor.part]}: tensor {tensor.name!r}"

    @property
    def identities(self) -> tuple[FileIdentity, ...]:
        return tuple(part.identity for part in self.parts)

    def changed(self) -> list[Path]:
        return [part.path for part in self.parts if part.identity_now() != part.identity]

    def other_headers(self) -> list[Path]:
        """Parts whose header is no longer the parsed one.  Raises OSError."""
        return [part.path for part in self.parts if not part.has_its_header()]

    @property
    def total_bytes(self) -> int:
        return sum(t.n_bytes for t in self.tensors.values())


NO_FILES = GgufFiles((), {}, {}, ())
"""Those of a model that is not read from files."""


def part_paths(path: Path) -> tuple[Path, ...]:
    """All parts of the model that ``path`` belongs to, in order.  Raises GgufError."""
    match = _PART.match(path.name)
    if match is None:
        return (path,)
    n, number = int(match["count"]), int(match["number"])
    if not 1 <= number <= n:
        raise GgufError(str(path), "split file", f"its name says part {number} of {n}: restore its original name")
    names = (f"{match['stem']}-{i:05d}-of-{n:05d}.{match['suffix']}" for i in range(1, n + 1))
    parts = tuple(path.with_name(name) for name in names)
    missing = [p.name for p in parts if not p.exists()]
    if missing:
        raise GgufError(
            str(path),
            "split file",
            f"{len(missing)} of {n} parts are missing, first {missing[0]}: put them in the same directory",
        )
    return parts


def open_model(paths: Sequence[Path]) -> GgufFiles:
    """Open and parse every part.  Raises GgufError, OSError."""
    headers: list[GgufHeader] = []
    parts: list[OpenFile] = []
    tensors: dict[str, TensorInfo] = {}
    for i, path in enumerate(paths):
        part = OpenFile(path)
        header = part.header()
        _check_part(path, header, i, len(paths))
        for t in header.tensors.values():
            if t.name in tensors:
                raise GgufError(str(path), f"tensor {t.name!r}", "is also in an earlier part of the split model")
            tensors[t.name] = TensorInfo(t.name, t.kind, t.shape, t.offset, t.n_bytes, i)
        headers.append(header)
        parts.append(part)
    expected = headers[0].metadata.get("split.tensors.count")
    if len(paths) > 1 and isinstance(expected, int) and expected != len(tensors):
        raise GgufError(
            str(paths[0]), "metadata value 'split.tensors.count'", f"says {expected}, the parts hold {len(tensors)}"
        )
    return GgufFiles(tuple(paths), headers[0].metadata, tensors, tuple(parts))


def _check_part(path: Path, header: GgufHeader, i: int, n_parts: int) -> None:
    count, number = header.metadata.get("split.count", 0), header.metadata.get("split.no", i)
    if count in (0, 1) and n_parts == 1:
        return
    if count not in (0, n_parts):
        reason = (
            f"says {count}, but {n_parts} are open: put all parts, named STEM-00001-of-0000N.gguf, into one directory"
        )
        raise GgufError(str(path), "metadata value 'split.count'", reason)
    if number != i:
        reason = f"says {number}, but it is part {i} by its name: restore the original names of all parts"
        raise GgufError(str(path), "metadata value 'split.no'", reason)
