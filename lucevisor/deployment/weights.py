"""Checks that all shards load the same weights.

A group may load a file only when its identity (``FileIdentity``) is that of the files that were planned with, or when
hashing it gave the same digests.  Each file is hashed once, in the background, and the digests are kept for later
starts.  docs/adr/0007 explains why the supervisor hashes and not the shards.

Invariant: every identity in ``_admitted`` was seen on files with the bytes of the running plan.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import structlog

from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.weight_digests import (
    DigestsStopped,
    FileChangedError,
    HashProgress,
    digest_tensors,
    read_digests,
    write_digests,
)
from lucevisor.errors import LucevisorError
from lucevisor.model.drafters import open_draft
from lucevisor.model.fingerprint import fingerprint
from lucevisor.model.gguf_files import GgufFiles, identity_of, open_model
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.values import FileIdentity
from lucevisor.placement.stages import LoadFiles
from lucevisor.snapshots.file_format import DraftModel

TICK_S = 0.1
"""Kernels stamp file times with a clock that moves every 1 to 10 ms; only times older than that prove that nothing was
written since."""
COARSE_TICK_S = 2.0
"""The same for file systems that store whole seconds."""

CLOSE_S = 2.0
"""Timeout in seconds for the end of a pass, which takes one read of 1 MiB unless the disk hangs."""

_RELOAD = "`lucevisor stop`, then `lucevisor start`, loads the new file into every group"

log = structlog.get_logger("weights")


class WeightsChangedError(LucevisorError):
    """The model on disk is not the one that runs."""


class ModelWeights:
    """``files``: as the supervisor opened them.  ``directory``: where digests are kept.  ``what``: for messages."""

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
        """Start hashing in the background; does nothing the second time."""
        if self._hashing is None:
            self._hashing = asyncio.create_task(self._digests(self._files, self._progress), name="weight digests")
            self._hashing.add_done_callback(self._on_hashed)

    async def digests(self) -> dict[str, str]:
        """Return xxh3_128 of every tensor.  Raises LucevisorError when the files cannot be hashed."""
        self.begin()
        assert self._hashing is not None
        return await asyncio.shield(self._hashing)

    def progress(self) -> str:
        """Return the progress of hashing, for messages."""
        done, total = self._progress.done_bytes, self._progress.total_bytes
        return f"{100 * done // max(total, 1)} % of {total / 1e9:.1f} GB"

    async def close(self) -> None:
        """Stop hashing; returns when no thread reads any more, or after CLOSE_S."""
        for progress in self._passes:
            progress.stop = True
        tasks = [*self._comparing.values(), *([self._hashing] if self._hashing is not None else [])]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

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
        """Return whether files in this state hold the running plan's bytes."""
        return tuple(identities) in self._admitted

    async def admit(self) -> tuple[FileIdentity, ...]:
        """Return the identities that a daemon must find when it opens the files now.

        Raises WeightsChangedError unless they provably hold the running plan's bytes, LucevisorError when they cannot
        be read.
        """
        try:
            known = await asyncio.to_thread(_now_among, self._files.paths, tuple(self._admitted))
            if known is not None:
                return known
            files = await asyncio.to_thread(self._reopen, self._files.paths)
        except (GgufError, OSError) as error:
            raise LucevisorError(f"{self._what} cannot be read any more: {error}") from error
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
        except FileChangedError as error:
            raise WeightsChangedError(f"{error}; {_RELOAD}") from error
        except DigestsStopped as error:
            raise LucevisorError("the supervisor is stopping") from error
        except (GgufError, OSError) as error:
            raise LucevisorError(f"{self._what} cannot be read: {error}") from error
        log.debug("weights hashed", n_bytes=progress.total_bytes, seconds=round(time.monotonic() - started, 3))
        if seconds_until_stable(identities, began_ns) <= 0:
            await asyncio.to_thread(write_digests, self._directory, identities, digests)
        return digests


def seconds_until_stable(identities: Sequence[FileIdentity], now_ns: int) -> float:
    """Return the seconds until a write would change the times of every file; 0 or less: it would now."""

    def end_ns(identity: FileIdentity) -> int:
        coarse = identity.ctime_ns % 1_000_000_000 == 0
        return identity.ctime_ns + int((COARSE_TICK_S if coarse else TICK_S) * 1e9)

    return (max(map(end_ns, identities), default=now_ns) - now_ns) / 1e9


def _now_among(paths: Sequence[Path], admitted: Sequence[tuple[FileIdentity, ...]]) -> tuple[FileIdentity, ...] | None:
    """Return the admitted identities that the files have now, or None, without opening a file.  Raises OSError."""
    stats = [path.stat() for path in paths]
    for identities in admitted:
        if all(identity_of(s, i.header) == i for s, i in zip(stats, identities, strict=True)):
            return identities
    return None


async def _wait_until_stable(files: GgufFiles) -> None:
    """Wait until later writes change the files' times, also writes within a tick of the last one and through a memory
    map whose pages are already dirty, which fsync write-protects."""

    def sync() -> None:
        for part in files.parts:
            with suppress(OSError):
                os.fsync(part.fileno())

    await asyncio.to_thread(sync)
    await asyncio.sleep(min(max(0.0, seconds_until_stable(files.identities, time.time_ns())), COARSE_TICK_S))


def _shapes(files: GgufFiles) -> object:
    return {name: (t.kind, t.shape) for name, t in files.tensors.items()}


class ServedWeights:
    """``directory``: where digests are kept."""

    def __init__(self, served: ServedModel, directory: Path) -> None:
        assert served.spec.files is not None
        self._served = served
        self.model = ModelWeights(served.spec.files, directory)
        self.draft: ModelWeights | None = None
        if served.drafter is not None:
            has_own_files = served.drafter.files is not served.spec.files
            self.draft = (
                ModelWeights(served.drafter.files, directory, reopen=open_draft, what="the drafter")
                if has_own_files
                else self.model
            )

    @property
    def _all(self) -> list[ModelWeights]:
        return [self.model] if self.draft is None or self.draft is self.model else [self.model, self.draft]

    async def model_files(self) -> LoadFiles:
        """Return the files of the model that a daemon loads.  Raises as :meth:`ModelWeights.admit` does."""
        return LoadFiles([str(path) for path in self._served.files], await self.model.admit())

    async def draft_files(self) -> LoadFiles:
        """Return the files of the drafter that a daemon loads; call it only if there is one.

        Raises in the same way.
        """
        assert self.draft is not None
        assert self._served.drafter is not None
        return LoadFiles([str(path) for path in self._served.drafter.files.paths], await self.draft.admit())

    async def draft_model(self) -> DraftModel:
        """Return the identity of the drafter's state when its tensors are hashed.  Raises LucevisorError."""
        assert self.draft is not None
        assert self._served.drafter is not None
        digests, drafter = await self.draft.digests(), self._served.drafter
        mark = await asyncio.to_thread(fingerprint, replace(drafter.spec.model, files=drafter.files), digests)
        return DraftModel(mark, drafter.spec.model.layers)

    def admitted(self, identities: Sequence[FileIdentity]) -> bool:
        """Return whether files that a daemon read, first the model's, then the drafter's, hold the right bytes."""
        n = len(self._served.files)
        of_model, of_draft = identities[:n], identities[n:]
        return self.model.admitted(of_model) and (
            not of_draft or (self.draft is not None and self.draft.admitted(of_draft))
        )

    async def wait_until_stable(self) -> None:
        """See :meth:`ModelWeights.wait_until_stable`."""
        for weights in self._all:
            await weights.wait_until_stable()

    def begin(self) -> None:
        """Start hashing in the background; does nothing the second time."""
        for weights in self._all:
            weights.begin()

    def progress(self) -> str:
        return self.model.progress()

    async def close(self) -> None:
        """Stop hashing."""
        for weights in self._all:
            await weights.close()
