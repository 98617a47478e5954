"""Checks that all shards load the same weights; docs/adr/0007 says why the supervisor hashes and not the shards.

A group may load a file if its identity is that of the files that were planned with, or if hashing gave the same
digests.  Each file is hashed once, in blocks by several threads, and the digests are kept for later starts. Invariants:
all digests are of one state of the file; each identity in ``_admitted`` was seen on files with the bytes of the running
plan.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import structlog
import xxhash

from lucevisor.deployment.cache_files import read_json, write_json
from lucevisor.deployment.served_model import ServedModel
from lucevisor.errors import LucevisorError
from lucevisor.model.drafters import open_draft
from lucevisor.model.fingerprint import fingerprint
from lucevisor.model.gguf_files import GgufFiles, OpenFile, open_model
from lucevisor.model.gguf_header import GgufError, TensorInfo
from lucevisor.model.values import FileIdentity, identity_of
from lucevisor.placement.stages import LoadFiles
from lucevisor.protocol.loading import AdapterFile, Load, OfferedFile
from lucevisor.protocol.threads import lower_priority
from lucevisor.snapshots.file_format import DraftModel

BLOCK_BYTES = 64 << 20
READ_BYTES = 1 << 20
"""Bytes read and hashed at a time: they fit the processor's cache, and the interpreter lock is released meanwhile."""

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
    """Return the digests of ``tensors`` of these files, if they are there."""

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


class WeightsChangedError(LucevisorError):
    """The model on disk is not the one that runs."""


@dataclass(slots=True)
class HashProgress:
    """Progress of a pass; setting ``stop`` ends it within one read."""

    total_bytes: int
    done_bytes: int = 0
    stop: bool = False


def digest_tensors(
    files: GgufFiles, progress: HashProgress | None = None, *, n_threads: int = 2, keep_cached: bool = True
) -> dict[str, str]:
    """Return 32 hex digits for each tensor.  ``keep_cached``: leave what was read in the page cache.

    Raises WeightsChangedError, DigestsStopped, GgufError, OSError.
    """
    progress = progress or HashProgress(files.total_bytes)
    in_order = sorted(files.tensors.values(), key=lambda t: (t.part, t.offset))
    blocks = [(tensor, start) for tensor in in_order for start in range(0, tensor.n_bytes, BLOCK_BYTES)]

    def digest(block: tuple[TensorInfo, int]) -> bytes:
        tensor, start = block
        fd, first = files.parts[tensor.part].fileno(), tensor.offset + start
        at, end = first, min(first + BLOCK_BYTES, tensor.offset + tensor.n_bytes)
        buffer, hash_ = memoryview(bytearray(READ_BYTES)), xxhash.xxh3_128()
        while at < end:
            if progress.stop:
                raise DigestsStopped
            n = os.preadv(fd, [buffer[: end - at]], at)
            if n == 0:
                raise GgufError(str(files.paths[tensor.part]), f"tensor {tensor.name!r}", _CUT)
            hash_.update(buffer[:n])
            at += n
            progress.done_bytes += n  # an update lost between threads only makes a message less exact
        if not keep_cached:
            os.posix_fadvise(fd, first, end - first, os.POSIX_FADV_DONTNEED)
        return hash_.digest()

    _check_unchanged(files)
    with ThreadPoolExecutor(n_threads, thread_name_prefix="weight hash", initializer=lower_priority) as pool:
        try:
            digests = list(pool.map(digest, blocks))
        except BaseException:
            progress.stop = True
            raise
    _check_unchanged(files)
    hashes = {name: xxhash.xxh3_128() for name in files.tensors}
    for (tensor, _), of_block in zip(blocks, digests, strict=True):
        hashes[tensor.name].update(of_block)
    return {name: hash_.hexdigest() for name, hash_ in hashes.items()}


def _check_unchanged(files: GgufFiles) -> None:
    for path in files.changed():
        raise WeightsChangedError(f"{path} was changed while it was hashed; {_RELOAD}")


TICK_S = 0.1
"""Kernels stamp file times with a clock that moves every 1 to 10 ms; only times older than that prove that nothing was
written since."""
COARSE_TICK_S = 2.0
"""The age of a file time that proves as much on file systems that store whole seconds."""

_RELOAD = "`lucevisor stop`, then `lucevisor start`, loads the new file into every group"

log = structlog.get_logger("lucevisor.deployment")


class ModelWeights:
    """``files``: as the supervisor opened them.  ``directory``: where digests are kept."""

    def __init__(
        self,
        files: GgufFiles,
        directory: Path,
        *,
        reopen: Callable[[Sequence[Path]], GgufFiles] = open_model,
        what: str = "the model",
    ) -> None:
        self._files, self._directory, self._reopen, self._what = files, directory, reopen, what
        self._admitted = {files.identities}
        self._known: dict[str, str] | None = None
        self._hashing: asyncio.Task[dict[str, str]] | None = None
        self._comparing: dict[tuple[FileIdentity, ...], asyncio.Task[None]] = {}
        self._progress = HashProgress(files.total_bytes)
        self._passes = [self._progress]

    # ---- the files that were planned with

    async def wait_until_stable(self) -> None:
        """Wait until later writes would show in the files' times.  Raises WeightsChangedError if they have changed."""
        await _wait_until_stable(self._files)
        try:
            changed = self._files.changed() or await asyncio.to_thread(self._files.other_headers)
        except OSError as error:
            raise LucevisorError(f"{self._what} cannot be read: {error}") from error
        if changed:
            reason = f"{changed[0]} was changed while the supervisor started: start again when the file is complete"
            raise WeightsChangedError(reason)

    def begin(self) -> None:
        if self._hashing is None:
            self._hashing = asyncio.create_task(self._digests(self._files, self._progress), name="weight digests")
            self._hashing.add_done_callback(self._on_hashed)

    async def digests(self) -> dict[str, str]:
        """Return xxh3_128 of every tensor.  Raises LucevisorError."""
        self.begin()
        assert self._hashing is not None
        return await asyncio.shield(self._hashing)

    def progress(self) -> str:
        done, total = self._progress.done_bytes, self._progress.total_bytes
        return f"{100 * done // max(total, 1)} % of {total / 1e9:.1f} GB"

    async def close(self) -> None:
        """Stop hashing; returns when no thread reads any more, unless the disk hangs."""
        for progress in self._passes:
            progress.stop = True
        tasks = [*self._comparing.values(), *([self._hashing] if self._hashing is not None else [])]
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)

    def _on_hashed(self, task: asyncio.Task[dict[str, str]]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._known = task.result()
        elif not self._progress.stop:
            log.error("weights not hashed", reason=str(error))

    # ---- files that daemons load

    def admitted(self, identities: Sequence[FileIdentity]) -> bool:
        return tuple(identities) in self._admitted

    async def admit(self) -> tuple[FileIdentity, ...]:
        """Return the identities that a daemon must find when it opens the files now.

        Raises WeightsChangedError unless they provably hold the running plan's bytes, LucevisorError.
        """
        try:
            known = await asyncio.to_thread(_now_among, self._files.paths, tuple(self._admitted))
            if known is not None:
                return known
            files = await asyncio.to_thread(self._reopen, self._files.paths)
        except (GgufError, OSError) as error:
            raise LucevisorError(f"{self._what} cannot be read any more: {_why(error)}") from error
        identities = files.identities
        if identities not in self._admitted:
            if identities not in self._comparing:
                task = self._comparing[identities] = asyncio.create_task(self._compare(files), name="compare weights")
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, awaited or not
            try:
                await asyncio.shield(self._comparing[identities])
            finally:
                if identities in self._comparing and self._comparing[identities].done():
                    del self._comparing[identities]
        return identities

    async def load_files(self) -> LoadFiles:
        """Return the files that a daemon loads.  Raises as ``admit`` does."""
        return LoadFiles([str(path) for path in self._files.paths], await self.admit())

    async def _compare(self, files: GgufFiles) -> None:
        """Admit ``files`` if they hold the same bytes.  Raises WeightsChangedError."""
        path = next(
            p for p, new, old in zip(files.paths, files.identities, self._files.identities, strict=True) if new != old
        )
        if (files.metadata, _shapes(files)) != (self._files.metadata, _shapes(self._files)):
            raise WeightsChangedError(
                f"{path} changed since the supervisor started: its header is another one; {_RELOAD}"
            )
        if self._known is None:
            what = "was written to, replaced or renamed since the supervisor started, before all its bytes were hashed"
            raise WeightsChangedError(
                f"{path} {what}: nothing shows that it holds what the other groups loaded; {_RELOAD}"
            )
        log.info("model file is not the one that was opened; comparing its bytes", file=str(path))
        await _wait_until_stable(files)
        progress = HashProgress(files.total_bytes)
        self._passes.append(progress)
        digests = await self._digests(files, progress)
        differing = [name for name, digest in digests.items() if digest != self._known[name]]
        if differing:
            where = files.paths[files.tensors[differing[0]].part]
            what = f"tensor {differing[0]!r}" + (f" and {len(differing) - 1} more hold" if differing[1:] else " holds")
            raise WeightsChangedError(
                f"{where} changed since the supervisor started: {what} other bytes than the running groups; {_RELOAD}"
            )
        log.info("model file holds the same bytes", file=str(path))
        self._admitted.add(files.identities)

    async def _digests(self, files: GgufFiles, progress: HashProgress) -> dict[str, str]:
        identities = files.identities
        known = await asyncio.to_thread(read_digests, self._directory, identities, files.tensors.keys())
        if known is not None:
            return known
        keep = 2 * progress.total_bytes <= psutil.virtual_memory().total
        n_threads = min(4, max(1, len(os.sched_getaffinity(0)) // 4))
        started, began_ns = time.monotonic(), time.time_ns()
        try:
            digests = await asyncio.to_thread(digest_tensors, files, progress, n_threads=n_threads, keep_cached=keep)
        except DigestsStopped as error:
            raise LucevisorError("the supervisor is stopping") from error
        except (GgufError, OSError) as error:
            raise LucevisorError(f"{self._what} cannot be read: {error}") from error
        log.debug("weights hashed", n_bytes=progress.total_bytes, seconds=round(time.monotonic() - started, 3))
        if seconds_until_stable(identities, began_ns) <= 0:
            await asyncio.to_thread(write_digests, self._directory, identities, digests)
        return digests


def seconds_until_stable(identities: Sequence[FileIdentity], now_ns: int) -> float:
    """Return the seconds until a write would change the times of every file."""

    def end_ns(identity: FileIdentity) -> int:
        coarse = identity.ctime_ns % 1_000_000_000 == 0
        return identity.ctime_ns + int((COARSE_TICK_S if coarse else TICK_S) * 1e9)

    return (max(map(end_ns, identities), default=now_ns) - now_ns) / 1e9


def _now_among(paths: Sequence[Path], admitted: Sequence[tuple[FileIdentity, ...]]) -> tuple[FileIdentity, ...] | None:
    """Return the admitted identities that the files have now, if any.  Raises OSError."""
    stats = [path.stat() for path in paths]
    for identities in admitted:
        if all(identity_of(s, i.header) == i for s, i in zip(stats, identities, strict=True)):
            return identities
    return None


async def _wait_until_stable(files: GgufFiles) -> None:
    """Wait until later writes change the files' times, also those through a memory map, whose dirty pages fsync
    write-protects."""

    def sync() -> None:
        for part in files.parts:
            with suppress(OSError):
                os.fsync(part.fileno())

    await asyncio.to_thread(sync)
    await asyncio.sleep(min(max(0.0, seconds_until_stable(files.identities, time.time_ns())), COARSE_TICK_S))


def _shapes(files: GgufFiles) -> object:
    return {name: (t.kind, t.shape) for name, t in files.tensors.items()}


def open_offered(load: Load) -> tuple[list[OfferedFile], list[OpenFile]]:
    """Open all files that a load names, for a daemon that may not have them.  Raises LucevisorError."""
    models: list[tuple[Callable[[Sequence[Path]], GgufFiles], Sequence[str], Sequence[FileIdentity]]] = []
    models.append((open_model, load.files, load.identities))
    if load.draft is not None:
        models.append((open_draft, load.draft.files, load.draft.identities))
    models += [(open_model, [one.file], [one.identity]) for one in load.adapters]
    if load.score is not None:
        models.append((open_model, load.score.files, ()))
    if load.vision is not None:
        models.append((open_model, load.vision.files, ()))
    opened: dict[str, OpenFile] = {}
    try:
        for open_files, paths, identities in models:
            if new := [Path(path) for path in paths if path not in opened]:
                opened |= {str(part.path): part for part in open_files(new).parts}
            for path, identity in zip(paths, identities, strict=False):
                if opened[path].identity != identity:
                    raise WeightsChangedError(f"{path} was changed a moment ago; {_RELOAD}")
    except (GgufError, OSError) as error:
        raise LucevisorError(f"the model's files cannot be read any more: {_why(error)}") from error
    return [OfferedFile(path, part.header_bytes, part.identity) for path, part in opened.items()], [*opened.values()]


class ServedWeights:
    def __init__(self, served: ServedModel, directory: Path) -> None:
        self._served = served
        self.model = ModelWeights(served.spec.files, directory)
        self.adapters = {
            one.name: ModelWeights(one.files, directory, what=f"the adapter {one.name}") for one in served.spec.adapters
        }
        self.draft = self.model
        if served.drafter is not None and served.drafter.files is not served.spec.files:
            self.draft = ModelWeights(served.drafter.files, directory, reopen=open_draft, what="the drafter")

    @property
    def _all(self) -> list[ModelWeights]:
        return list(dict.fromkeys([self.model, *self.adapters.values(), self.draft]))

    async def adapter_files(self) -> list[AdapterFile]:
        return [
            AdapterFile(one.name, str(one.files.paths[0]), one.scale, (await self.adapters[one.name].admit())[0])
            for one in self._served.spec.adapters
        ]

    async def adapter_digests(self) -> dict[str, dict[str, str]]:
        return {name: await weights.digests() for name, weights in self.adapters.items()}

    async def draft_model(self) -> DraftModel:
        """Return the identity of the drafter's state.  Raises LucevisorError."""
        assert self._served.drafter is not None
        digests, drafter = await self.draft.digests(), self._served.drafter
        mark = await asyncio.to_thread(fingerprint, replace(drafter.spec.model, files=drafter.files), digests)
        return DraftModel(mark, drafter.spec.model.layers)

    def admitted(self, identities: Sequence[FileIdentity]) -> bool:
        """Return whether the files that a daemon read (model, adapters, drafter) hold the right bytes."""
        n, n_adapters = len(self._served.files), len(self.adapters)
        of_model, of_adapters, of_draft = identities[:n], identities[n : n + n_adapters], identities[n + n_adapters :]
        if len(of_adapters) < n_adapters or not self.model.admitted(of_model):
            return False
        if not all(one.admitted([i]) for one, i in zip(self.adapters.values(), of_adapters, strict=True)):
            return False
        return not of_draft or self.draft.admitted(of_draft)

    async def wait_until_stable(self) -> None:
        for weights in self._all:
            await weights.wait_until_stable()

    def begin(self) -> None:
        for weights in self._all:
            weights.begin()

    async def close(self) -> None:
        for weights in self._all:
            await weights.close()


def _why(error: GgufError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}; put the file back, or start without it"
    return str(error)
