"""Snapshot files that are damaged, foreign or unreadable are refused with the reason."""

import errno
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lucevisor.snapshots import disk
from lucevisor.snapshots.file_format import Fault
from lucevisor.snapshots.store import SnapshotRefused
from tests.snapshots.snapshot_parts import (
    made_slot,
    made_store,
    must_fail,
    names,
    restore,
    save,
    saved_before,
)

ROOT = Path(__file__).parents[2]


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


def test_a_file_cut_while_it_is_read(tmp_path):
    store, entry, good, _ = each_damage(tmp_path)
    reading = store.open_for_restore(entry)
    os.truncate(tmp_path / entry.file, len(good) - 10)
    with pytest.raises(SnapshotRefused, match="ends at byte"):
        store.check(reading)
    store.close_snapshot(reading)
    store.close()


def test_a_disk_that_cannot_be_read(tmp_path, monkeypatch):
    store = made_store(tmp_path)
    kept, _ = saved_before(store)
    for call, place in (("pread", "header"), ("preadv", "header"), ("preadv", "tensors")):
        entry = save(store)
        n_calls = []

        real = getattr(os, call)

        def broken(*args, n_calls=n_calls, real=real, skip=int(place == "tensors")):
            n_calls.append(args)
            if len(n_calls) <= skip:
                return real(*args)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(disk.os, call, broken)
        refused = must_be_refused(store, entry, Fault.UNREADABLE)
        monkeypatch.undo()
        assert refused.reason == f"{place}: cannot be read: EIO, Input/output error"
    assert restore(store, kept)
    store.close()


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


def test_a_supervisor_that_stops_inside_the_lock_delays_nobody_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "LOCK_S", 0.2)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom lucevisor.snapshots import disk\n"
        "with disk.locked(Path(sys.argv[1])):\n    print('locked', flush=True)\n    time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"locked\n"
    store = made_store(tmp_path)
    began = time.monotonic()
    must_fail(store, made_slot(), "locked", "another process has held its lock")
    assert time.monotonic() - began < 20
    other.kill()
    other.wait()
    other.stdout.close()
    assert restore(store, save(store))  # the kernel gave the lock back
    store.close()
