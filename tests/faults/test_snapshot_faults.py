"""What goes wrong on the way to the disk and back: never a crash, never a wrong state, always a line that says why."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lucevisor.kv.tokens import TokenBuffer
from lucevisor.snapshots.store import DISK_FAILURES, STEPS, SaveFailed, SnapshotRefused
from tests.daemons.snapshot_pipeline import SlotPipeline, golden_spec, ids_of, state_model
from tests.faults.snapshot_saver import NEW, OLD, N
from tests.snapshots.snapshot_parts import made_slot, made_store, must_fail, names, restore, save, saved_before

ROOT = Path(__file__).parents[2]


# ---- kill -9


class Saver:
    """The process of snapshot_saver."""

    def __init__(self, directory):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.snapshot_saver", directory],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def save(self, kill_at):
        self._process.stdin.write(f"{kill_at}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().split()

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(60) == 0


def test_kill_9_at_every_point_of_a_save(tmp_path):
    """Supervisor's steps and daemon's writes alike.  The old file restores, the new one is whole or absent."""
    spec = golden_spec("qwen35")
    old_ids, new_ids = ids_of(spec, N, seed=OLD), ids_of(spec, N, seed=NEW)
    pipeline = SlotPipeline(spec, seed=3)
    pipeline.open(0)
    pipeline.run(0, old_ids)
    store = made_store(tmp_path, state_model(spec), disk_bytes=1 << 30)
    kept = pipeline.save(store, old_ids, pipeline.place(0, 0))
    wanted = restore(store, kept)
    points = []
    with closing(Saver(tmp_path)) as saver:
        kill_everywhere(saver, store, kept, wanted, new_ids, points)
    written = [p for p in points if p.startswith("layers.")]
    assert [p for p in points if p not in written] == list(STEPS)
    assert set(written) == {t.name for t in kept.snapshot.tensors}
    assert len(written) > len(set(written))
    store.close()


def kill_everywhere(saver, store, kept, wanted, new_ids, points):
    while True:
        word, number, *name = saver.save(len(points))
        if word == "done":
            assert int(number) == len(points)
            break
        assert (word, int(number)) == ("killed", len(points))
        points += name
        check_after_kill(store, points[-1], kept, wanted, new_ids)
        for file in store.directory.glob("*.safetensors"):
            if file.name != kept.file:
                file.unlink()


def check_after_kill(store, point, kept, wanted, new_ids):
    leftovers = [n for n in names(store.directory) if n.endswith(".partial")]
    with capture_logs() as logs:
        entries = store.scan()
    assert restore(store, kept) == wanted
    assert not [n for n in names(store.directory) if not n.endswith(".safetensors")]
    removed = [line["file"] for line in logs if line["event"] == "snapshot leftover removed"]
    assert removed == leftovers
    published = point in ("sync_directory", "prune")
    assert len(entries) == (2 if published else 1), point
    assert bool(leftovers) == (not published and point != "create"), point
    match = store.find([*new_ids, 1], N)
    assert (match is not None) == published
    if match:
        restore(store, match.entry)  # complete: every checksum is right


def test_the_file_of_a_killed_supervisor_is_not_removed_while_a_daemon_writes_it(tmp_path):
    """The daemon's copy of the descriptor keeps the lock; when it is gone too, the next scan cleans up."""
    store = made_store(tmp_path)
    writing = store.begin(made_slot())
    daemon = subprocess.Popen(["sleep", "60"], pass_fds=[writing.fd])
    os.close(writing.fd)  # what the kernel does with a killed supervisor
    writing.done = True
    store.scan()
    assert names(tmp_path) == [writing.path.name]
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    store.scan()
    assert names(tmp_path) == []
    store.close()


# ---- errors of the disk


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("step", [s for s in STEPS if s not in ("sync_directory", "prune")])
def test_an_error_at_any_step_leaves_the_earlier_files(tmp_path, step, number):
    armed = []

    def at(name):
        if armed and name == step:
            raise OSError(number, os.strerror(number))

    store = made_store(tmp_path, at=at)
    entry, data = saved_before(store)
    armed.append(True)
    must_fail(store, made_slot(), "disk_full" if number == errno.ENOSPC else "io", errno.errorcode[number])
    armed.clear()
    assert restore(store, entry) == data
    assert restore(store, save(store))  # and the next one works
    store.close()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_fsync_is_never_repeated(tmp_path, monkeypatch, failing):
    """The first is for the data, the second for the header."""
    store = made_store(tmp_path)
    entry, data = saved_before(store)
    real, calls = os.fsync, []

    def fsync(fd):
        calls.append(fd)
        if len(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    must_fail(store, made_slot(), "io", "EIO 5")
    assert len(calls) == failing
    assert restore(store, entry) == data
    assert restore(store, save(store))
    store.close()


def test_a_full_disk_makes_room_of_the_oldest_snapshots(small_disk):
    directory = small_disk(1024)
    now = [1000.0]
    store = made_store(directory, clock=lambda: now[0])
    store.scan()
    for n in range(30):
        entry = save(store, made_slot(1000, start=n))
        os.utime(directory / entry.file, (n, n))
        store.scan()
    kept = [e.snapshot.packed_tokens for e in store.entries]
    assert 1 < len(kept) < 29
    assert kept == [TokenBuffer.of(made_slot(1000, start=n).tokens).packed() for n in range(30 - len(kept), 30)]
    assert len(restore(store, entry)) == len(entry.snapshot.tensors)
    assert store.budget < 1 << 20
    must_fail(store, made_slot(12_000, start=999), "disk_full", "ENOSPC 28: No space left on device")
    assert len(store.scan()) == len(kept)  # none was removed for what has no room at all
    store.close()


@pytest.mark.parametrize("step", STEPS[: STEPS.index("rename") + 1])
def test_a_directory_that_goes_away_during_a_save_stops_no_other(tmp_path, step):
    steps = []

    def at(name):
        steps.append(name)
        if name == step and steps.count(name) == 2:
            shutil.rmtree(tmp_path / "cache")

    store = made_store(tmp_path / "cache", at=at)
    store.scan()
    save(store, made_slot(start=900))
    with capture_logs() as logs, pytest.raises(SaveFailed, match="ENOENT") as caught:
        save(store)
    assert caught.value.label == "removed"
    assert caught.value.label not in DISK_FAILURES
    assert [line["event"] for line in logs] == ["snapshot not saved"]
    again = save(store)
    assert [e.file for e in store.entries] == names(tmp_path / "cache") == [again.file]
    assert restore(store, again)
    store.close()


# ---- what is wrong with a file when it is read


# ---- damaged and unreadable files


def must_be_refused(store, entry, fault=None):
    """Never handed out or never passed; set aside with its reason in the log."""
    with capture_logs() as logs, pytest.raises(SnapshotRefused) as caught:
        restore(store, entry)
    assert fault is None or caught.value.fault is fault
    (line,) = logs
    assert (line["event"], line["log_level"], line["file"]) == ("snapshot refused", "warning", entry.file)
    assert line["reason"] == caught.value.reason
    assert line["set_aside"].startswith(entry.file + ".refused")
    assert entry.file not in names(store.directory)
    assert entry.file not in [e.file for e in store.entries]
    return caught.value


def each_damage(tmp_path, n_tokens=40):
    """A store, a good entry and its bytes; ``put(data)`` makes them the file again."""
    store = made_store(tmp_path)
    entry = save(store, made_slot(n_tokens))
    path = tmp_path / entry.file
    good = path.read_bytes()

    def put(data):
        for name in names(tmp_path):
            (tmp_path / name).unlink()
        path.write_bytes(data)
        store._index[entry.file] = entry

    return store, entry, good, put


def test_random_damage_never_passes(tmp_path):
    """Whatever is overwritten, the file is refused, and the slot can be saved again."""
    store, entry, good, put = each_damage(tmp_path)
    source = random.Random(5)
    for _ in range(150):
        at, n = source.randrange(len(good)), source.choice([1, 2, 8, 100, 5000])
        data = good[:at] + source.randbytes(n) + good[at + n :]
        if data == good:
            continue
        put(data)
        with suppress(AssertionError):
            must_be_refused(store, entry)
            continue
        raise AssertionError(f"{n} bytes at {at} were not found")
    put(good)
    assert restore(store, entry)
    assert restore(store, save(store))
    store.close()
