"""A GGUF model on disk: one file, or the parts of a split one, mapped and presented as one tensor table.

The maps are read-only and shared with the page cache; nothing is read until a tensor's bytes are asked for.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lucevisor.wire.gguf_header import GgufError, GgufHeader, TensorInfo, Value, parse

_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufFiles:
    """Headers and maps of all parts; ``metadata`` is that of the first part."""

    paths: tuple[Path, ...]
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    maps: tuple[mmap.mmap, ...]

    def bytes_of(self, tensor: TensorInfo) -> memoryview:
        """The tensor's bytes as stored, without copying."""
        return memoryview(self.maps[tensor.part])[tensor.offset : tensor.offset + tensor.n_bytes]

    @property
    def total_bytes(self) -> int:
        return sum(t.n_bytes for t in self.tensors.values())


def part_paths(path: Path) -> tuple[Path, ...]:
    """All parts of the model that ``path`` belongs to, in order; the path itself when it is not split."""
    match = _PART.match(path.name)
    if match is None:
        return (path,)
    n, number = int(match["count"]), int(match["number"])
    if not 1 <= number <= n:
        raise GgufError(
            str(path), "split file", f"its name says part {number} of {n}: give it the name it was made with"
        )
    parts = tuple(path.with_name(f"{match['stem']}-{i:05d}-of-{n:05d}.gguf") for i in range(1, n + 1))
    missing = [p.name for p in parts if not p.exists()]
    if missing:
        raise GgufError(
            str(path), "split file", f"{len(missing)} of {n} parts are missing, first {missing[0]}: put them beside it"
        )
    return parts


def open_model(paths: Sequence[Path]) -> GgufFiles:
    """Map and parse every part.  Raises :class:`GgufError`, and OSError for a file that cannot be opened."""
    headers: list[GgufHeader] = []
    maps: list[mmap.mmap] = []
    tensors: dict[str, TensorInfo] = {}
    for i, path in enumerate(paths):
        mapped = _map(path)
        header = parse(memoryview(mapped), str(path))
        _check_part(path, header, i, len(paths))
        for t in header.tensors.values():
            if t.name in tensors:
                raise GgufError(str(path), f"tensor {t.name!r}", "is also in an earlier part of the split model")
            tensors[t.name] = TensorInfo(t.name, t.kind, t.shape, t.offset, t.n_bytes, i)
        headers.append(header)
        maps.append(mapped)
    expected = headers[0].metadata.get("split.tensors.count")
    if len(paths) > 1 and isinstance(expected, int) and expected != len(tensors):
        raise GgufError(
            str(paths[0]), "metadata value 'split.tensors.count'", f"says {expected}, the parts hold {len(tensors)}"
        )
    return GgufFiles(tuple(paths), headers[0].metadata, tensors, tuple(maps))


def _check_part(path: Path, header: GgufHeader, i: int, n_parts: int) -> None:
    """The header of a part says which one it is; a part opened under another name or place is refused."""
    count, number = header.metadata.get("split.count", 0), header.metadata.get("split.no", i)
    if count in (0, 1) and n_parts == 1:
        return
    if count not in (0, n_parts):
        reason = (
            f"says {count}, opened are {n_parts}: put all parts, named STEM-00001-of-0000N.gguf, into one directory"
        )
        raise GgufError(str(path), "metadata value 'split.count'", reason)
    if number != i:
        reason = f"says {number}, its place among the parts is {i}: give each part the name it was made with"
        raise GgufError(str(path), "metadata value 'split.no'", reason)


def _map(path: Path) -> mmap.mmap:
    # O_NONBLOCK: opening a pipe that nobody writes would wait for ever
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise GgufError(str(path), "file", "is not a regular file: name a .gguf file")
        if status.st_size < 24:
            raise GgufError(str(path), "byte 0", "the file is too short to be a GGUF file: fetch it again")
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
