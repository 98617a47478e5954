"""The snapshot store on a real disk: what is saved is restored, and nothing else is touched."""

import gc
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from lucevisor.errors import ConfigError
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import Dtype, LayerRange
from lucevisor.snapshots import disk
from lucevisor.snapshots.file_format import Fault, SlotRecord, lay_out, max_file_bytes
from lucevisor.snapshots.store import SaveFailed, SnapshotRefused
from tests.snapshots.snapshot_parts import (
    ALL,
    FULL_ONLY,
    LAYERS,
    made_model,
    made_slot,
    made_store,
    names,
    restore,
    save,
)


@pytest.fixture
def store(tmp_path):
    made = made_store(tmp_path / "cache")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def every_descriptor_is_closed():
    gc.collect()  # what an earlier test left is not counted as ours
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_slot_comes_back_after_a_restart(store):
    with capture_logs() as logs:
        entry = save(store)
    assert names(store.directory) == [entry.file]
    assert [line["event"] for line in logs] == ["snapshot saved"]
    assert (store.directory / entry.file).stat().st_mode & 0o777 == 0o600
    again = made_store(store.directory)
    assert [e.file for e in again.scan()] == [entry.file]
    match = again.find([*made_slot().tokens, 1, 2], 41)
    assert match.n_tokens == 40
    assert restore(again, match.entry) == restore(store, entry)
    reading = again.open_for_restore(match.entry)
    assert reading.tokens == tuple(made_slot().tokens)
    assert {t.name for t in reading.tensors(LayerRange(1, 3))} == {
        "layers.1.k", "layers.1.v", "layers.2.k", "layers.2.v",
    }  # fmt: skip
    assert reading.n_bytes(reading.tensors(ALL)) == sum(t.n_bytes for t in reading.snapshot.tensors)
    again.close_snapshot(reading)
    again.close_snapshot(reading)
    again.close()
    assert (store.statistics.n_saved, store.statistics.saved_bytes) == (1, entry.n_bytes)


def test_the_least_recently_used_go_first(tmp_path):
    now = [1000.0]
    store = made_store(tmp_path, clock=lambda: now[0])
    entries = [save(store, made_slot(start=i)) for i in range(4)]
    for i, one in enumerate(entries):
        os.utime(tmp_path / one.file, (i, i))
    store.scan()
    now[0] = 2000.0
    store.close_snapshot(store.open_for_restore(entries[0]))  # in use again, and the disk remembers
    assert (tmp_path / entries[0].file).stat().st_mtime == 2000.0
    with capture_logs() as logs:
        gone = store.prune(entries[0].n_bytes * 2)
    assert [g.file for g in gone] == [entries[1].file, entries[2].file]
    assert [line["event"] for line in logs] == ["snapshot pruned"] * 2
    assert names(tmp_path) == sorted([entries[0].file, entries[3].file])
    assert {e.file for e in store.entries} == {entries[0].file, entries[3].file}
    store.close()


def test_the_budget_holds_after_every_save_for_all_models(tmp_path):
    other = made_store(tmp_path, made_model("Made 2B", "cd"))
    old = [save(other, made_slot(start=i)) for i in range(3)]
    for i, one in enumerate(old):
        os.utime(tmp_path / one.file, (i, i))
    store = made_store(tmp_path, disk_bytes=3 * old[0].n_bytes)
    new = save(store)
    assert names(tmp_path) == sorted([old[1].file, old[2].file, new.file])
    store.close()
    other.close()


def test_too_few_bytes_from_the_daemons_are_a_failed_save(store):
    writing = store.begin(made_slot())
    with pytest.raises(SaveFailed, match="wrote 7 bytes of") as caught:
        store.finish(writing, 7)
    assert caught.value.label == "size"
    assert names(store.directory) == []


# ---- what is not ours, and what is not a snapshot


def test_files_of_others_are_never_touched(store):
    files = {"notes.txt": b"x", "model.safetensors": b"y" * 10000, "lucevisor-1.safetensors": b"", ".hidden": b"z"}
    for name, data in files.items():
        (store.directory / name).write_bytes(data)
    (store.directory / "folder").mkdir()
    outside = store.directory.parent / "outside"
    outside.write_bytes(b"o")
    link = store.directory / "lucevisor-0123456789abcdef-0123456789abcdef.safetensors"
    link.symlink_to(outside)
    assert store.scan() == []
    save(store)
    store.prune(0)
    assert {n: (store.directory / n).read_bytes() for n in files} == files
    assert link.is_symlink()
    assert outside.read_bytes() == b"o"


def test_files_of_another_model_are_left_alone(tmp_path):
    other = made_store(tmp_path, made_model("Made 2B", "cd"))
    entry = save(other)
    store = made_store(tmp_path)
    with capture_logs() as logs:
        assert store.scan() == []
    assert [(line["event"], line["n_others"]) for line in logs] == [("snapshots scanned", 1)]
    with capture_logs() as logs, pytest.raises(SnapshotRefused, match="is that of 'Made 2B'") as caught:
        store.open_for_restore(entry)
    assert caught.value.fault is Fault.OTHER_MODEL
    assert logs[0]["set_aside"] == ""
    assert restore(other, entry)
    store.close()
    other.close()


def test_an_invalid_file_with_our_name_is_set_aside_once(store):
    good = save(store)
    name = good.file[:-28] + "0123456789abcdef.safetensors"
    (store.directory / name).write_bytes(b"hello" * 1000)
    with capture_logs() as logs:
        assert [e.file for e in store.scan()] == [good.file]
    refused = [line for line in logs if line["event"] == "snapshot refused"]
    assert [(line["file"], line["set_aside"]) for line in refused] == [(name, name + ".refused")]
    assert names(store.directory) == sorted([good.file, name + ".refused"])
    with capture_logs() as logs:
        store.scan()
    assert not [line for line in logs if line["event"] == "snapshot refused"]
    (store.directory / name).write_bytes(b"hello")
    store.scan()
    assert name + ".refused.1" in names(store.directory)
    store.prune(0)  # evidence is the operator's
    assert names(store.directory) == [name + ".refused", name + ".refused.1"]


def test_a_file_that_is_gone_is_refused_and_forgotten(store):
    entry = save(store)
    (store.directory / entry.file).unlink()
    with pytest.raises(SnapshotRefused) as caught:
        store.open_for_restore(entry)
    assert caught.value.fault is Fault.GONE
    assert store.entries == []


def test_a_replaced_file_is_refused(store):
    a, b = save(store), save(store, made_slot(start=1))
    (store.directory / b.file).rename(store.directory / a.file)
    with pytest.raises(SnapshotRefused, match="replaced"):
        store.open_for_restore(a)


# ---- two supervisors


def test_a_restore_survives_pruning_of_its_file(tmp_path):
    one, two = made_store(tmp_path), made_store(tmp_path)
    reading = one.open_for_restore(save(one))
    two.prune(0)
    one.check(reading)
    one.close_snapshot(reading)
    one.close()
    two.close()


def test_a_directory_that_stays_locked_is_an_error(store, monkeypatch):
    monkeypatch.setattr(disk, "LOCK_S", 0.05)
    with disk.locked(store.directory):
        with capture_logs() as logs, pytest.raises(SaveFailed, match="another process has held its lock") as caught:
            store.begin(made_slot())
        assert caught.value.label == "locked"
        assert logs[0]["event"] == "snapshot not saved"
        with pytest.raises(ConfigError, match=r"cache\.dir"):
            store.scan()
    save(store)


# ---- which file restores most


TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(TEXT, max_size=5),
    prompt=TEXT,
    most=st.integers(0, 11),
    layers=st.sampled_from([FULL_ONLY, LAYERS]),
)
def test_longest_match(tmp_path_factory, texts, prompt, most, layers):
    """A slot with a recurrent state or a window is a match as a whole only.  Of equal ones the last used wins."""
    now = [0.0]
    store = made_store(tmp_path_factory.mktemp("cache"), made_model(layers=layers), clock=lambda: now[0])
    for seconds, text in enumerate(texts):
        now[0] = float(seconds)
        store.close_snapshot(store.open_for_restore(save(store, SlotRecord(text, 100.0))))
    matches = []
    for entry in store.entries:
        n = 0
        while n < min(len(prompt), most, entry.n_tokens) and entry.tokens[n] == prompt[n]:
            n += 1
        if n and (layers is FULL_ONLY or n == entry.n_tokens):
            matches.append((n, entry.used_s))
    found = store.find(prompt, most)
    assert (None if found is None else (found.n_tokens, found.entry.used_s)) == max(matches, default=None)
    store.close()


@pytest.mark.parametrize("layers", [LAYERS, FULL_ONLY])
@pytest.mark.parametrize("kv_dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.Q8_0])
def test_a_file_is_never_larger_than_said(layers, kv_dtype):
    model = made_model(layers=layers, kv_dtype=kv_dtype)
    for n in (1, 14, 15, 16, 17, 100, 4097, 50_000):
        header = lay_out(model, SlotRecord([(7919 * i * i) % 248320 for i in range(n)], 1763800000.123456))
        assert header.file_bytes <= max_file_bytes(model, n) <= header.file_bytes + 20_000 + 7 * n


def test_a_file_is_of_one_adapter_and_of_its_bytes(tmp_path):
    """The state of the same tokens with another adapter, or another file of that name, is another state."""
    both = replace(made_model(), adapters={"a": "a1" * 32, "b": "b1" * 32})
    stores = [made_store(tmp_path, one) for one in (both, both, replace(both, adapters={"a": "c1" * 32}))]
    store, again, other = stores
    tokens = made_slot().tokens
    for adapter in ("", "a"):
        save(store, made_slot_of(tokens, adapter))
    assert len(names(tmp_path)) == 2
    for one in (store, again):
        one.scan()
        for adapter in ("", "a"):
            match = one.find(TokenBuffer(tokens, adapter), len(tokens))
            assert match is not None
            assert (match.entry.adapter, match.entry.tokens) == (adapter, TokenBuffer(tokens, adapter))
        assert one.find(TokenBuffer(tokens, "b"), len(tokens)) is None
    other.scan()
    assert other.find(TokenBuffer(tokens, "a"), len(tokens)) is None
    assert other.find(TokenBuffer(tokens), len(tokens)) is not None
    for one in stores:
        one.close()


def made_slot_of(tokens, adapter):
    return SlotRecord(TokenBuffer(tokens, adapter), 100.0)
