"""Model files on a host that does not have them: sparse copies of what its shards read, in this host's cache directory.

``locate`` replaces the paths of a load by those of files with the same bytes here: the file at the path itself if it is
the supervisor's, the file there if its pieces have the same checksums, else a copy.  Loaders see a file as any other.
Pieces come from the supervisor, and a journal has those that are whole, so a cut or a kill costs a second of them.
Invariants: a journal names only pieces that were on the disk before it was, with their checksums; if a file was touched
since, all its pieces are compared with those; nobody writes to a copy while a daemon loads it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import msgspec
from msgspec.structs import replace

from daemons.errors import LoadError
from lucevisor.model.drafters import open_draft, read_draft_spec
from lucevisor.model.families import read_spec
from lucevisor.model.gguf_files import GgufFiles, open_model
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, FileIdentity, LayerRange, identity_of
from lucevisor.model.weight_layout import shard_layouts
from lucevisor.protocol.files import ByteFile, FileError, LocalFile
from lucevisor.protocol.loading import Load, OfferedFile

PIECE_BYTES = 1 << 20
RUN_PIECES = 4
"""Pieces that are asked for at once."""
JOURNAL_S = 1.0
"""How often finished pieces are written down."""
_FULL = (errno.ENOSPC, errno.EDQUOT)

Report = Callable[[int, int], None]
"""Gets the bytes that are there, and those that are needed."""
Range = tuple[str, int, int]
"""A path as the load has it, and a half-open range of bytes."""


class Journal(msgspec.Struct, frozen=True):
    """``status``: of each file when this was written.  ``pieces``: by file, their numbers and CRC-32."""

    status: list[FileIdentity]
    pieces: list[dict[int, int]]
    version: int = 1


class _OtherBytesError(Exception):
    """A file of this host does not have the supervisor's bytes."""


def copies_directory(configured: str) -> Path:
    """Return where copies are kept: ``configured``, or in the user's cache directory.  Raises LoadError."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if configured:
            return Path(configured).expanduser()
        return (base if base.is_absolute() else Path.home() / ".cache") / "lucevisor" / "models"
    except RuntimeError as error:
        raise LoadError("model files", f"there is no home directory: {error}", "set cluster.cache_dir") from error


class ModelFiles:
    """The parts of a model at the supervisor, and the files of this host that stand for them: those at the same paths
    (``own``), or copies in ``cache``.  ``close`` lets others write to them."""

    def __init__(
        self, offered: Sequence[OfferedFile], sources: Sequence[ByteFile], cache: Path, report: Report, *, own: bool
    ) -> None:
        self._offered, self._sources, self._report, self._own = offered, sources, report, own
        of_source = [(Path(one.path).name, *_lasting(one.identity)) for one in offered]
        self._directory = cache / sha256(msgspec.json.encode(of_source)).hexdigest()[:32]
        here = [Path(one.path) if own else self._directory / Path(one.path).name for one in offered]
        self.paths = {one.path: path for one, path in zip(offered, here, strict=True)}
        self._journal_path = self._directory / ("own.journal" if own else "journal")
        self._pieces: list[dict[int, int]] = [{} for _ in offered]
        self._lock = -1

    def require(self, ranges: Iterable[Range]) -> None:
        """Make sure that ranges have the supervisor's bytes, and that they stay.  Raises LoadError."""
        index = {one.path: i for i, one in enumerate(self._offered)}
        needed = sorted(
            {
                (index[path], piece)
                for path, start, stop in ranges
                for piece in range(start // PIECE_BYTES, -(-stop // PIECE_BYTES))
            }
        )
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            self._hold(fcntl.LOCK_SH)
            self._read_journal()
            if any(piece not in self._pieces[i] for i, piece in needed):
                self._hold(fcntl.LOCK_EX)
                self._read_journal()
                self._complete(needed)
                self._hold(fcntl.LOCK_SH)
        except OSError as error:
            raise self._failed(error) from error

    def identities(self) -> list[FileIdentity]:
        """The identities of the files as they are now, with the headers that they are to have.  Raises OSError."""
        return [
            identity_of(path.stat(), one.identity.header)
            for path, one in zip(self.paths.values(), self._offered, strict=True)
        ]

    def close(self) -> None:
        """Let others write to the files; idempotent."""
        fd, self._lock = self._lock, -1
        if fd >= 0:
            os.close(fd)

    # ---- pieces

    def _complete(self, needed: Sequence[tuple[int, int]]) -> None:
        missing = [(i, piece) for i, piece in needed if piece not in self._pieces[i]]
        total = sum(self._length(i, piece) for i, piece in needed)
        done = total - sum(self._length(i, piece) for i, piece in missing)
        if not self._own:
            self._check_space(total - done)
        fds = [self._open(i) for i in range(len(self._offered))]
        files, saved_at = [LocalFile(fd) for fd in fds], time.monotonic()
        buffer = memoryview(bytearray(RUN_PIECES * PIECE_BYTES))
        try:
            for i, first, n in _runs(missing):
                self._report(done, total)
                part = buffer[: sum(self._length(i, first + k) for k in range(n))]
                self._fetch(i, files[i], first * PIECE_BYTES, part)
                for k in range(n):
                    self._pieces[i][first + k] = crc32(part[k * PIECE_BYTES : (k + 1) * PIECE_BYTES])
                done += len(part)
                if time.monotonic() - saved_at > JOURNAL_S:
                    self._write_journal(fds)
                    saved_at = time.monotonic()
            self._write_journal(fds)
            self._report(done, total)
        finally:
            for file in files:
                file.close()

    def _fetch(self, i: int, file: LocalFile, offset: int, part: memoryview) -> None:
        """Read ``part`` of a file and write it, or compare it where the file is this host's own."""
        offered, source = self._offered[i], self._sources[i]
        try:
            if self._own:
                file.read([part], offset)
                if crc32(part) != source.checksum(offset, len(part)):
                    raise _OtherBytesError(f"{offered.path}: {len(part)} bytes at {offset} are not the supervisor's")
                return
            source.read([part], offset)
        except FileError as error:
            advice = "the group is started again and goes on from there; leave the file alone while groups load it"
            raise LoadError(f"{offered.path}, byte {offset}", error.reason, advice) from error
        try:
            file.write([part], offset)
        except FileError as error:
            raise self._failed(OSError(error.errno, error.reason)) from error

    def _length(self, i: int, piece: int) -> int:
        return min(PIECE_BYTES, self._offered[i].identity.n_bytes - piece * PIECE_BYTES)

    def _open(self, i: int) -> int:
        path = self.paths[self._offered[i].path]
        if self._own:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(fd).st_size != self._offered[i].identity.n_bytes:
            os.ftruncate(fd, self._offered[i].identity.n_bytes)
        return fd

    def _check_owner(self) -> None:
        """Refuse what another user made: the name follows from the model, and a journal there would be believed."""
        found = self._directory.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise LoadError(
                str(self._directory), "other users can change what is kept there", "remove it, or set cluster.cache_dir"
            )

    def _check_space(self, n_bytes: int) -> None:
        found = os.statvfs(self._directory)
        if (free := found.f_bavail * found.f_frsize) < n_bytes:
            raise self._no_space(f"{n_bytes} bytes of the model are to be kept there, and {free} are free")

    # ---- journal and lock

    def _read_journal(self) -> None:
        """Know the pieces that are whole; if the files were touched since, those that have their checksums still."""
        self._pieces = [{} for _ in self._offered]
        try:
            journal = msgspec.msgpack.decode(self._journal_path.read_bytes(), type=Journal)
            now = self.identities()
        except (OSError, msgspec.MsgspecError):
            return
        known = [(i, piece, check) for i, pieces in enumerate(journal.pieces) for piece, check in pieces.items()]
        fits = len(journal.pieces) == len(self._offered) and all(
            0 <= piece * PIECE_BYTES < self._offered[i].identity.n_bytes for i, piece, _ in known
        )
        if journal.version == 1 and fits:
            unchanged = journal.status == now
            for i, piece, check in known if unchanged else self._still_whole(known):
                self._pieces[i][piece] = check

    def _still_whole(self, known: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
        opened = {i: LocalFile(os.open(path, os.O_RDONLY)) for i, path in enumerate(self.paths.values())}
        try:
            for n, (i, piece, check) in enumerate(known):
                self._report(n, len(known))
                with suppress(FileError):  # it is shorter now
                    if opened[i].checksum(piece * PIECE_BYTES, self._length(i, piece)) == check:
                        yield i, piece, check
        finally:
            for file in opened.values():
                file.close()

    def _write_journal(self, fds: Sequence[int]) -> None:
        """Write down the pieces, once they are on the disk."""
        if not self._own:
            for fd in fds:
                os.fdatasync(fd)
        written = self._journal_path.with_name(f"{self._journal_path.name}.new")
        written.write_bytes(msgspec.msgpack.encode(Journal(self.identities(), self._pieces)))
        written.replace(self._journal_path)

    def _hold(self, kind: int) -> None:
        """Lock the directory for reading, or alone, in place of the lock before."""
        if self._lock < 0:
            self._lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        while True:
            try:
                fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:  # another daemon of this host fills the copy, or loads it
                self._report(0, 1)
                time.sleep(0.2)

    def _failed(self, error: OSError) -> LoadError:
        if error.errno in _FULL:
            return self._no_space(error.strerror or str(error))
        return LoadError(str(self._directory), f"the model cannot be kept there: {error}", "check cluster.cache_dir")

    def _no_space(self, reason: str) -> LoadError:
        return LoadError(str(self._directory), reason, "free space there, or set cluster.cache_dir")


def _lasting(identity: FileIdentity) -> tuple[int, int, str]:
    """What of an identity stays with the bytes when a file is linked or renamed."""
    return identity.n_bytes, identity.mtime_ns, identity.header


def _runs(pieces: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (file, first piece, number of pieces) of neighbours, RUN_PIECES at most."""
    at = 0
    while at < len(pieces):
        i, first = pieces[at]
        n = 1
        while n < RUN_PIECES and at + n < len(pieces) and pieces[at + n] == (i, first + n):
            n += 1
        yield i, first, n
        at += n


# ---- a load


@dataclass(slots=True)
class LocatedLoad:
    """``load`` with paths and identities of this host.  Close it when it is loaded."""

    load: Load
    files: list[ModelFiles]
    asked: dict[FileIdentity, FileIdentity]  # of the files here: those at the supervisor

    def as_asked(self, identities: Sequence[FileIdentity]) -> list[FileIdentity]:
        """Return the identities of the supervisor's files for those that were loaded here."""
        return [self.asked.get(identity, identity) for identity in identities]

    def close(self) -> None:
        for one in self.files:
            one.close()


def locate(
    load: Load,
    sources: Sequence[ByteFile],
    backend: Backend,
    cache: Path,
    report: Report,
    log: Callable[[str, str], None] = lambda event, reason: None,
) -> LocatedLoad:
    """Find the files of a load on this host, or get what is needed of them from ``sources``, which are closed.

    ``cache``: where copies are kept; ``log`` gets an event and its reason.  Raises GgufError and LoadError.
    """
    locating = _Locating(load, sources, cache, report, log)
    try:
        return locating.run(backend) if load.offered else locating.located
    except BaseException:
        locating.located.close()
        raise
    finally:
        for source in sources:
            source.close()


class _Locating:
    def __init__(
        self, load: Load, sources: Sequence[ByteFile], cache: Path, report: Report, log: Callable[[str, str], None]
    ) -> None:
        self._offered = {one.path: (one, source) for one, source in zip(load.offered, sources, strict=True)}
        self._here = {path: Path(path) for path in self._offered}
        self._cache, self._report, self._log = cache, report, log
        self.located = LocatedLoad(load, [], {})

    def run(self, backend: Backend) -> LocatedLoad:
        load = self.located.load
        draft, score, vision = load.draft, load.score, load.vision

        def of_target(files: GgufFiles) -> Iterator[Range]:
            spec = read_spec(files, load.options)
            for plan in load.stages:
                for i, shard in enumerate(plan.shards):
                    embedding, output = plan.embedding and i == 0, plan.output and i == len(plan.shards) - 1
                    yield from self._of_shard(spec, shard.layers, backend, embedding=embedding, output=output)
            if draft is not None:
                own = files if draft.files == load.files else open_draft([self._here[path] for path in draft.files])
                drafter = read_draft_spec(own, spec, draft.kind, load.options)
                layouts = drafter.layouts(backend, load.dtype, with_output=False, with_embedding=False)
                yield from self._of_tensors(drafter.model.files, (layout.name for layout in layouts))

        def of_scorer(files: GgufFiles) -> Iterator[Range]:
            spec = read_spec(files)
            yield from self._of_shard(spec, LayerRange(0, spec.n_layers), backend, embedding=True, output=False)

        if draft is not None and draft.files != load.files:  # the drafter's device reads nearly all of them
            self._find(draft.files, open_draft, lambda files: self._of_tensors(files, files.tensors))
        self._find(load.files, open_model, of_target)
        for adapter in load.adapters:
            self._find([adapter.file], open_model, lambda files: self._of_tensors(files, files.tensors))
        if score is not None:
            self._find(score.files, open_model, of_scorer)
        if vision is not None:
            self._find(vision.files, open_model, lambda files: self._of_tensors(files, files.tensors))
        self.located.load = self._relocated(load)
        return self.located

    def _find(
        self,
        paths: Sequence[str],
        open_files: Callable[[Sequence[Path]], GgufFiles],
        ranges_of: Callable[[GgufFiles], Iterable[Range]],
    ) -> None:
        """Find files of one model here.  ``ranges_of``: what is needed of them."""
        offered, sources = [self._offered[path][0] for path in paths], [self._offered[path][1] for path in paths]
        if all(map(_is_here, offered)):
            return
        for own in (True, False) if all(map(_looks_alike, offered)) else (False,):
            files = ModelFiles(offered, sources, self._cache, self._report, own=own)
            self.located.files.append(files)
            try:
                files.require((one.path, 0, one.header_bytes) for one in offered)
                self._here |= files.paths
                opened = open_files([files.paths[path] for path in paths])
                for one, identity in zip(offered, opened.identities, strict=True):
                    if identity.header != one.identity.header:
                        raise _OtherBytesError(f"{one.path}: its header is not the supervisor's")
                files.require(ranges_of(opened))
                here = zip(offered, files.identities(), strict=True)
                self.located.asked |= {identity: one.identity for one, identity in here}
                return
            except _OtherBytesError as error:
                files.close()
                if not own:
                    raise LoadError(str(error), "it was changed while it was sent", "start the group again") from error
                self._log("this host's file is not used, but a copy of the supervisor's", str(error))

    def _of_shard(
        self, spec: ModelSpec, layers: LayerRange, backend: Backend, *, embedding: bool, output: bool
    ) -> Iterator[Range]:
        layouts = shard_layouts(
            spec, layers, embedding=embedding, output=output, backend=backend, dtype=self.located.load.dtype
        )
        yield from self._of_tensors(spec.files, (layout.name for layout in layouts))

    def _of_tensors(self, files: GgufFiles, names: Iterable[str]) -> Iterator[Range]:
        """Yield where these tensors lie, but for those of files that were found before."""
        asked = {path: name for one in self.located.files[-1:] for name, path in one.paths.items()}
        for tensor in (files.tensors[name] for name in names):
            if (path := asked.get(files.paths[tensor.part])) is not None:
                yield path, tensor.offset, tensor.offset + tensor.n_bytes

    def _relocated(self, load: Load) -> Load:
        here = {asked: identity for identity, asked in self.located.asked.items()}

        def paths(names: Sequence[str]) -> list[str]:
            return [str(self._here[name]) for name in names]

        def identities(asked: Sequence[FileIdentity]) -> list[FileIdentity]:
            return [here.get(identity, identity) for identity in asked]

        draft, score, vision = load.draft, load.score, load.vision
        adapters = [
            replace(one, file=paths([one.file])[0], identity=identities([one.identity])[0]) for one in load.adapters
        ]
        if draft is not None:
            draft = replace(draft, files=paths(draft.files), identities=identities(draft.identities))
        if score is not None:
            score = replace(score, files=paths(score.files))
        if vision is not None:
            vision = replace(vision, files=paths(vision.files))
        return replace(
            load,
            files=paths(load.files),
            identities=identities(load.identities),
            draft=draft,
            score=score,
            vision=vision,
            adapters=adapters,
            offered=[],
        )


def _is_here(one: OfferedFile) -> bool:
    """Return whether the file at a path is the supervisor's itself."""
    try:
        return identity_of(Path(one.path).stat(), one.identity.header) == one.identity
    except OSError:
        return False


def _looks_alike(one: OfferedFile) -> bool:
    """Return whether the file at a path has the size and the header of the supervisor's."""
    try:
        path = Path(one.path)
        if not path.is_file() or path.stat().st_size != one.identity.n_bytes:
            return False
        with path.open("rb") as file:
            return sha256(file.read(one.header_bytes)).hexdigest() == one.identity.header
    except OSError:
        return False
