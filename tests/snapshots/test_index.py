"""The file that restores most of a prompt, and how large a file will be, against laying out and comparing all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import Dtype
from lucevisor.snapshots.file_format import SlotRecord, lay_out
from lucevisor.snapshots.index import SnapshotIndex
from lucevisor.snapshots.policy import FileSizes, SnapshotEntry
from tests.snapshots.snapshot_parts import FULL_ONLY, LAYERS, made_model

MODEL = made_model(layers=FULL_ONLY)


def entry(tokens, used_s, file):
    snapshot = lay_out(MODEL, SlotRecord(list(tokens), 0.0))
    return SnapshotEntry(file, snapshot, snapshot.file_bytes, used_s)


TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(
    texts=st.lists(TEXT, max_size=6),
    gone=st.lists(TEXT, max_size=8),
    prompt=TEXT,
    most=st.integers(0, 14),
    whole_only=st.booleans(),
)
def test_longest_match(texts, gone, prompt, most, whole_only):
    """Entries come, are replaced and go in any order; a lookup finds what comparing all of them would."""
    entries = [entry(t, float(i), f"{i}.safetensors") for i, t in enumerate(texts)]
    index = SnapshotIndex(entry(t, 50.0, f"{i}.safetensors") for i, t in enumerate(gone))
    for one in entries:
        index.put(one)
    for i in range(len(texts), len(gone)):
        index.remove(f"{i}.safetensors")
    index.remove("unknown")
    assert sorted(one.file for one in index) == sorted(one.file for one in entries)
    found = index.find(TokenBuffer(prompt), most, whole_only=whole_only)
    usable = []
    for one in entries:
        n = 0
        while n < min(len(prompt), most, one.n_tokens) and one.snapshot.tokens[n] == prompt[n]:
            n += 1
        usable.append(0 if whole_only and n < one.n_tokens else n)
    assert (found.n_tokens if found else 0) == max(usable, default=0)
    if found:
        latest = max((n, one.used_s) for n, one in zip(usable, entries, strict=True))
        assert (found.n_tokens, found.entry.used_s) == latest


@pytest.mark.parametrize("layers", [LAYERS, FULL_ONLY])
@pytest.mark.parametrize("kv_dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.Q8_0])
def test_a_size_is_never_too_small_and_tensors_are_counted_exactly(layers, kv_dtype):
    model = made_model(layers=layers, kv_dtype=kv_dtype)
    sizes = FileSizes(model)
    slack = sizes.max_bytes(0)
    for n in (1, 14, 15, 16, 17, 100, 4097, 50_000):
        header = lay_out(model, SlotRecord([(7919 * i * i) % 248320 for i in range(n)], 1763800000.123456))
        assert header.file_bytes <= sizes.max_bytes(n) <= header.file_bytes + slack + 6 * n
