"""A small model with every kind of state, and what stands in for the daemons in tests of the store: bytes."""

from __future__ import annotations

import json
import os
import random
from hashlib import sha256

import pytest
from structlog.testing import capture_logs

from lucevisor.model.spec import LayerSpec, StateTensor, attention_state
from lucevisor.model.values import Dtype, KvGroup, LayerRange
from lucevisor.snapshots.file_format import SlotRecord, StateModel
from lucevisor.snapshots.store import SaveFailed, SnapshotStore

RECURRENT = (StateTensor("conv", (3, 10), Dtype.FLOAT32), StateTensor("delta", (2, 4, 4), Dtype.FLOAT32))
LAYERS = (
    LayerSpec(0, KvGroup.RECURRENT, {}, RECURRENT),
    LayerSpec(1, KvGroup.FULL, {}, attention_state(2, 6, 6)),
    LayerSpec(2, KvGroup.WINDOW, {}, attention_state(1, 8, 8), window=16),
)
ALL = LayerRange(0, 3)
FULL_ONLY = (LayerSpec(0, KvGroup.FULL, {}, attention_state(2, 6, 6)),)
BUDGET = 1 << 24


def made_model(name="Made 1B", digits="ab", kv_dtype=Dtype.FLOAT32, dtype=Dtype.FLOAT32, layers=LAYERS):
    return StateModel(digits * 32, "made", name, dtype, kv_dtype, layers)


def made_store(directory, model=None, **more):
    return SnapshotStore(directory, model or made_model(), more.pop("disk_bytes", BUDGET), **more)


def made_slot(n=40, start=0, created_s=100.0, **more):
    return SlotRecord([(7919 * i + start) % 248320 for i in range(n)], created_s, **more)


def fill(writing, seed=0):
    """What all daemons together do: write every tensor.  Returns the bytes written."""
    source = random.Random(seed)
    for tensor in writing.snapshot.tensors:
        os.pwrite(writing.fd, source.randbytes(tensor.n_bytes), tensor.offset)
    return writing.data_bytes


def save(store, slot=None, seed=0):
    writing = store.begin(slot or made_slot())
    return store.finish(writing, fill(writing, seed))


def restore(store, entry):
    """Open, check and read every tensor: {name: bytes}."""
    reading = store.open_for_restore(entry)
    try:
        store.check(reading)
        return {t.name: os.pread(reading.fd, t.n_bytes, t.offset) for t in reading.snapshot.tensors}
    finally:
        store.close_snapshot(reading)


def names(directory):
    """What lies in the directory, the lock aside."""
    return sorted(p.name for p in directory.iterdir() if p.name != "lucevisor.lock")


def saved_before(store):
    """An earlier file, and what is in it."""
    entry = save(store, made_slot(start=900))
    return entry, restore(store, entry)


def must_fail(store, slot, label, text):
    """A save that fails: with its reason, once in the log, and nothing left of it."""
    kept = names(store.directory)
    with capture_logs() as logs, pytest.raises(SaveFailed, match=text) as caught:
        save(store, slot)
    assert caught.value.label == label
    (line,) = [line for line in logs if line["event"] == "snapshot not saved"]
    assert line["reason"] in str(caught.value)
    assert line["log_level"] == "warning"
    assert names(store.directory) == kept
    assert store.statistics.failures[label] >= 1


def rewritten(header, **changes):
    """The header with other metadata, or with other fields of its slot; None takes one away."""
    rows = json.loads(header[8:])
    metadata = rows["__metadata__"]
    of_slot = {key: value for key, value in changes.items() if key not in metadata}
    if of_slot:
        record = json.loads(metadata["slot"]) | of_slot
        record = {key: value for key, value in record.items() if value is not None or key not in changes}
        metadata["slot"] = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    metadata |= {key: value for key, value in changes.items() if key in metadata}
    if "slot_check" not in changes:
        metadata["slot_check"] = sha256(metadata["slot"].encode()).hexdigest()
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    size = max(len(header) - 8, len(text))
    return size.to_bytes(8, "little") + text.ljust(size)
