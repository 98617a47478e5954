"""xxh3_128 of every tensor of a model, computed by threads that read the file in order.

Knows no fingerprint and no cache.  A tensor is hashed in blocks, so that a large one (all experts of a layer) keeps
several threads busy; its digest is the hash of its blocks' digests.  Memory: one buffer per thread.  Invariant: all
digests are of one state of the file, the same before and after reading.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import GgufError, TensorInfo

BLOCK_BYTES = 64 << 20
READ_BYTES = 1 << 20
"""Read and hashed at a time: fits the processor's cache, and releases the interpreter lock meanwhile."""
NICE = 10
"""Requests and loading come first where cores are few."""

_CUT = "unexpected end of file: it was truncated after it was opened; download it again"


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
