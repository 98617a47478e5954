"""A GGUF model on disk: one file, or the parts of a split one, mapped and presented as one tensor table.

The maps are read-only and shared with the page cache; nothing is read until a tensor's bytes are asked for.
"""

from __future__ import annotations

import mmap
import os
import re
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
    n = int(match["count"])
    parts = tuple(path.with_name(f"{match['stem']}-{i:05d}-of-{n:05d}.gguf") for i in range(1, n + 1))
    missing = [p.name for p in parts if not p.exists()]
    if missing:
        raise GgufError(str(path), "split file", f"{len(missing)} of {n} parts are missing, first {missing[0]}: put them beside it")
    return parts


def open_model(paths: Sequence[Path]) -> GgufFiles:
    """Map and parse every part.  Raises :class:`GgufError` (file, where, why) and OSError for a file that cannot be opened."""
    headers: list[GgufHeader] = []
    maps: list[mmap.mmap] = []
    tensors: dict[str, TensorInfo] = {}
    for i, path in enumerate(paths):
        mapped = _map(path)
        header = parse(memoryview(mapped), str(path))
        for t in header.tensors.values():
            if t.name in tensors:
                raise GgufError(str(path), f"tensor {t.name!r}", "is also in an earlier part of the split model")
            tensors[t.name] = TensorInfo(t.name, t.kind, t.shape, t.offset, t.n_bytes, i)
        headers.append(header)
        maps.append(mapped)
    expected = headers[0].metadata.get("split.tensors.count")
    if len(paths) > 1 and isinstance(expected, int) and expected != len(tensors):
        raise GgufError(str(paths[0]), "metadata value 'split.tensors.count'", f"says {expected}, the parts hold {len(tensors)}")
    return GgufFiles(tuple(paths), headers[0].metadata, tensors, tuple(maps))


def _map(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < 24:
            raise GgufError(str(path), "byte 0", "the file is too short to be a GGUF file: fetch it again")
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
