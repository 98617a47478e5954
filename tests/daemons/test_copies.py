"""Copies of model files: wherever a daemon is killed or cut off, the journal is right and nothing in it comes twice."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemons.errors import LoadError
from daemons.weights import copies
from daemons.weights.copies import Journal, ModelFiles
from lucevisor.model.values import identity_of
from lucevisor.protocol.files import FileError, LocalFile
from lucevisor.protocol.loading import OfferedFile
from tests.another_user import NOBODY, needs_root

PIECE = 1000
SIZES = (12_345, 7_000)


class Killed(BaseException):
    """A SIGKILL: nothing runs after it."""


class Plan:
    """Kills, or cuts the connection, at the ``at``-th thing that is done to a file."""

    def __init__(self, at: int | None = None, *, cut: bool = False) -> None:
        self.at, self.cut, self.n = at, cut, 0
        self.read: list[tuple[int, int]] = []

    def point(self, *, reading: bool = False) -> None:
        self.n += 1
        if self.n - 1 == self.at:
            if self.cut and reading:
                raise FileError(0, "the connection for files is gone")
            raise Killed


class Source(LocalFile):
    def __init__(self, fd: int, number: int, plan: Plan) -> None:
        super().__init__(fd)
        self._number, self._plan = number, plan

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        self._plan.point(reading=True)
        super().read(views, offset)
        n_bytes = sum(map(len, views))
        self._plan.read += [(self._number, piece) for piece in range(offset // PIECE, -(-(offset + n_bytes) // PIECE))]


class Model:
    def __init__(self, directory: Path) -> None:
        self.paths = [directory / f"model-{i}.gguf" for i in range(len(SIZES))]
        self.content = [random.Random(i).randbytes(n) for i, n in enumerate(SIZES)]
        for path, content in zip(self.paths, self.content, strict=True):
            path.write_bytes(content)
        self.offered = [OfferedFile(str(path), 100, identity_of(path.stat(), "header")) for path in self.paths]
        self.cache = directory / "cache"

    @contextmanager
    def files(self, plan: Plan, *, own: bool = False) -> Iterator[ModelFiles]:
        sources = [Source(os.open(path, os.O_RDONLY), i, plan) for i, path in enumerate(self.paths)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copies, "PIECE_BYTES", PIECE)
            patch.setattr(copies, "JOURNAL_S", -1.0)
            sync, replace = os.fdatasync, Path.replace
            patch.setattr(copies.os, "fdatasync", lambda fd: (plan.point(), sync(fd)))
            patch.setattr(Path, "replace", lambda path, to: (plan.point(), replace(path, to)))
            files = ModelFiles(self.offered, sources, self.cache, lambda done, total: None, own=own)
            try:
                yield files
            finally:
                files.close()
                for source in sources:
                    source.close()

    def journaled(self) -> set[tuple[int, int]]:
        """What the journal has, which is checked."""
        found = set()
        for path in self.cache.glob("*/journal"):
            journal = msgspec.msgpack.decode(path.read_bytes(), type=Journal)
            for i, pieces in enumerate(journal.pieces):
                kept = (path.parent / self.paths[i].name).read_bytes()
                for piece in pieces:
                    part = slice(piece * PIECE, (piece + 1) * PIECE)
                    assert kept[part] == self.content[i][part]
                    found.add((i, piece))
        return found


RANGES = st.lists(
    st.tuples(st.integers(0, len(SIZES) - 1), st.integers(0, 6_999), st.integers(1, 3_000)), min_size=1, max_size=4
)
ATTEMPTS = st.lists(st.tuples(RANGES, st.integers(0, 14), st.booleans()), max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(attempts=ATTEMPTS, last=RANGES, touched=st.booleans())
def test_what_was_kept_is_right_and_is_not_sent_again(
    attempts: list[tuple[list[tuple[int, int, int]], int, bool]], last: list[tuple[int, int, int]], touched: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = Model(Path(directory))

        def ranges(parts: list[tuple[int, int, int]]) -> list[tuple[str, int, int]]:
            return [(str(model.paths[i]), start, min(start + n, SIZES[i])) for i, start, n in parts]

        for parts, at, cut in attempts:
            before, plan = model.journaled(), Plan(at, cut=cut)
            with suppress(Killed, LoadError), model.files(plan) as files:
                files.require(ranges(parts))
            assert before.isdisjoint(plan.read)
            assert before <= model.journaled()
        if touched:  # another file's bytes in a piece that was kept
            for i, piece in sorted(model.journaled())[:1]:
                [kept] = model.cache.glob(f"*/{model.paths[i].name}")
                with kept.open("r+b") as file:
                    file.seek(piece * PIECE)
                    file.write(bytes(byte ^ 1 for byte in model.content[i][piece * PIECE :][:1]))
        plan = Plan()
        with model.files(plan) as files:
            files.require(ranges(last))
            for name, start, stop in ranges(last):
                with files.paths[name].open("rb") as file:
                    file.seek(start)
                    i = model.paths.index(Path(name))
                    assert file.read(stop - start) == model.content[i][start:stop]
        assert len(set(plan.read)) == len(plan.read)


@pytest.mark.parametrize("junk", [b"", b"\x00\xff", msgspec.msgpack.encode({"status": [], "pieces": [{0: 5}]})])
def test_a_journal_that_cannot_be_is_ignored(junk: bytes, tmp_path: Path) -> None:
    model = Model(tmp_path)
    for n in (13, 13):
        plan = Plan()
        with model.files(plan) as files:
            files.require([(str(model.paths[0]), 0, SIZES[0])])
        assert len(plan.read) == n
        [journal] = model.cache.glob("*/journal")
        journal.write_bytes(junk)


def test_a_source_of_another_time_has_another_folder(tmp_path: Path) -> None:
    model = Model(tmp_path)
    for _ in range(2):
        with model.files(Plan()) as files:
            files.require([(str(model.paths[0]), 0, 10)])
        os.utime(model.paths[0], (1, 1))
        model.offered = [OfferedFile(str(path), 100, identity_of(path.stat(), "header")) for path in model.paths]
    assert len(list(model.cache.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    model = Model(tmp_path)
    model.cache.write_text("a file")
    with model.files(Plan()) as files, pytest.raises(LoadError, match=r"the model cannot be kept there: .*cache_dir"):
        files.require([(str(model.paths[0]), 0, 10)])


@pytest.mark.parametrize(("mode", "uid"), [(0o770, None), pytest.param(0o700, NOBODY, marks=needs_root)])
def test_a_folder_of_other_users_is_not_believed(mode: int, uid: int | None, tmp_path: Path) -> None:
    model = Model(tmp_path)
    with model.files(Plan()) as files:
        files.require([(str(model.paths[0]), 0, 10)])
    [folder] = model.cache.iterdir()
    folder.chmod(mode)
    if uid is not None:
        os.chown(folder, uid, -1)
    with model.files(Plan()) as files, pytest.raises(LoadError, match=f"{folder}.*other users can change"):
        files.require([(str(model.paths[0]), 0, 10)])
