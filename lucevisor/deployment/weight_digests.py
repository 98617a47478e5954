"""xxh3_128 of every tensor of a model, and the cache that keeps them under the identity of the model's files.

Threads read the files in order.  A tensor is hashed in blocks, so that a large one (all experts of a layer) keeps
several threads busy; its digest is the hash of its blocks' digests.  Memory: one buffer per thread.  Invariant: all
digests are of one state of the file, the same before and after reading; digests that are read back were written,
unchanged since, for files of the same device, inode, size, times and header.  An error of the cache is none of the
model: it is hashed again.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from lucevisor.deployment.cache_files import read_json, write_json
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import GgufError, TensorInfo
from lucevisor.model.values import FileIdentity

BLOCK_BYTES = 64 << 20
READ_BYTES = 1 << 20
"""Bytes read and hashed at a time: they fit the processor's cache, and the interpreter lock is released meanwhile."""
NICE = 10
"""Niceness of the hashing threads, because requests and loading come first where cores are few."""

_CUT = "unexpected end of file: it was truncated after it was opened; download it again"


_DIGEST = re.compile("[0-9a-f]{32}")


class _DigestFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a file.  ``version`` changes with the layout or the hash."""

    version: Literal[1] = 1
    identities: tuple[FileIdentity, ...]
    digests: dict[str, str]
    check: str = ""  # sha256 of the rest

    def checked(self) -> _DigestFile:
        plain = msgspec.structs.replace(self, check="")
        return msgspec.structs.replace(self, check=sha256(msgspec.json.encode(plain)).hexdigest())


def digests_path(directory: Path, identities: Sequence[FileIdentity]) -> Path:
    return directory / f"weights-{sha256(msgspec.json.encode(list(identities))).hexdigest()[:32]}.json"


def read_digests(
    directory: Path, identities: Sequence[FileIdentity], tensors: Collection[str]
) -> dict[str, str] | None:
    """Return the digests of ``tensors`` of these files, or None when there are none."""

    def reject_reason(kept: _DigestFile) -> str:
        if kept.check != kept.checked().check:
            return "it is damaged: its checksum does not match"
        if kept.identities != tuple(identities) or kept.digests.keys() != set(tensors):
            return "it describes other files"
        return "" if all(map(_DIGEST.fullmatch, kept.digests.values())) else "it holds an invalid digest"

    kept = read_json(digests_path(directory, identities), _DigestFile, "weight digests", reject_reason)
    return None if kept is None else kept.digests


def write_digests(directory: Path, identities: Sequence[FileIdentity], digests: dict[str, str]) -> None:
    kept = _DigestFile(identities=tuple(identities), digests=digests).checked()
    write_json(digests_path(directory, identities), kept, "weight digests")


class DigestsStopped(Exception):
    """``stop`` was set."""


class FileChangedError(Exception):
    """A file changed while it was hashed."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} was changed while it was hashed")
        self.path = path


@dataclass(slots=True)
class HashProgress:
    """Progress of a pass; setting ``stop`` ends it within one read."""

    total_bytes: int
    done_bytes: int = 0
    stop: bool = False


@dataclass(frozen=True, slots=True)
class _Block:
    tensor: TensorInfo
    start: int
    n_bytes: int


def digest_tensors(
    files: GgufFiles, progress: HashProgress | None = None, *, n_threads: int = 2, keep_cached: bool = True
) -> dict[str, str]:
    """Return 32 hex digits for each tensor.  ``keep_cached``: leave what was read in the page cache.

    Raises FileChangedError, DigestsStopped, GgufError for a file that was cut, OSError.
    """
    progress = progress or HashProgress(files.total_bytes)
    blocks = list(_blocks(files))
    local = threading.local()

    def work(block: _Block) -> bytes:
        buffer = getattr(local, "buffer", None)
        if buffer is None:
            buffer = local.buffer = memoryview(bytearray(READ_BYTES))
        return _digest(files, block, buffer, progress, keep_cached)

    _check_unchanged(files)
    with ThreadPoolExecutor(n_threads, thread_name_prefix="weight hash", initializer=_lower_priority) as pool:
        try:
            digests = list(pool.map(work, blocks))
        except BaseException:
            progress.stop = True
            raise
    _check_unchanged(files)
    hashes = {name: xxhash.xxh3_128() for name in files.tensors}
    for block, hash_ in zip(blocks, digests, strict=True):
        hashes[block.tensor.name].update(hash_)
    return {name: hash_.hexdigest() for name, hash_ in hashes.items()}


def _blocks(files: GgufFiles) -> Iterator[_Block]:
    """Yield all tensors in file order."""
    for tensor in sorted(files.tensors.values(), key=lambda t: (t.part, t.offset)):
        for start in range(0, tensor.n_bytes, BLOCK_BYTES):
            yield _Block(tensor, start, min(BLOCK_BYTES, tensor.n_bytes - start))


def _digest(files: GgufFiles, block: _Block, buffer: memoryview, progress: HashProgress, keep_cached: bool) -> bytes:
    tensor, fd = block.tensor, files.parts[block.tensor.part].fileno()
    at, end = tensor.offset + block.start, tensor.offset + block.start + block.n_bytes
    digest = xxhash.xxh3_128()
    while at < end:
        if progress.stop:
            raise DigestsStopped
        n = os.preadv(fd, [buffer[: end - at]], at)
        if n == 0:
            raise GgufError(str(files.paths[tensor.part]), f"tensor {tensor.name!r}", _CUT)
        digest.update(buffer[:n])
        at += n
        progress.done_bytes += n  # an update lost between threads only makes a message less exact
    if not keep_cached:
        os.posix_fadvise(fd, tensor.offset + block.start, block.n_bytes, os.POSIX_FADV_DONTNEED)
    return digest.digest()


def _check_unchanged(files: GgufFiles) -> None:
    for path in files.changed():
        raise FileChangedError(path)


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of this thread alone
