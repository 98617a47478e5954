"""Snapshot headers: they round-trip, safetensors reads them, and every changed bit is found."""

import json
import re
import struct
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from lucevisor.kv.page_table import PagedOut
from lucevisor.model.spec import LayerSpec, attention_state
from lucevisor.model.values import PAGE_TOKENS, Dtype, KvGroup
from lucevisor.snapshots.file_format import (
    DATA_ALIGNMENT,
    FORMAT_VERSION,
    DraftModel,
    Fault,
    SlotRecord,
    SnapshotError,
    StateModel,
    check_fits,
    header_bytes,
    holds_draft,
    lay_out,
    pack,
    parse,
)
from tests.daemons.snapshot_pipeline import SlotPipeline, checkpoint, golden_spec, ids_of, state_model
from tests.snapshots import snapshot_parts
from tests.snapshots.snapshot_parts import made_store, rewritten

FINGERPRINT = "ab" * 32
LAYERS = (*snapshot_parts.LAYERS, LayerSpec(3, KvGroup.FULL, {}, (), shares_with=1))


def model(kv_dtype=Dtype.FLOAT32, layers=LAYERS, dtype=Dtype.FLOAT32, draft=None):
    return StateModel(FINGERPRINT, "made", "Made 1B", dtype, kv_dtype, layers, draft)


def slot(n=100, **more):
    return SlotRecord([(7919 * i) % 248320 for i in range(n)], 1753500000.25, **more)


def read(data, file_bytes):
    """What a reader does: the length, then as much as it asks for."""
    return parse(bytes(data)[: header_bytes(bytes(data[:8]), file_bytes)], file_bytes)


@given(
    n=st.integers(1, 400),
    kv_dtype=st.sampled_from(Dtype),
    heads=st.integers(1, 3),
    dim=st.integers(1, 70),
    window=st.integers(1, 80),
)
def test_tensors_are_contiguous_and_aligned_to_their_items(n, kv_dtype, heads, dim, window):
    layers = (
        LayerSpec(0, KvGroup.FULL, {}, attention_state(heads, dim, dim)),
        LayerSpec(1, KvGroup.RECURRENT, {}, snapshot_parts.RECURRENT),
        LayerSpec(2, KvGroup.WINDOW, {}, attention_state(heads, dim, dim), window=window),
    )
    snapshot = lay_out(model(kv_dtype, layers), slot(n))
    assert snapshot.data_start % DATA_ALIGNMENT == 0
    at = snapshot.data_start
    for t in snapshot.tensors:
        size = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}[t.dtype]
        assert t.offset == at
        assert t.offset % size == 0
        assert t.n_bytes == size * prod(t.shape)
        at += t.n_bytes
    assert at == snapshot.file_bytes
    assert len(pack(snapshot)) == snapshot.data_start
    assert parse(pack(snapshot), snapshot.file_bytes) == snapshot


TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300)


@given(tokens=TOKENS, created=st.floats(0, 1e11), name=st.text(max_size=30), data=st.data())
def test_what_is_packed_is_parsed(tokens, created, name, data):
    made = StateModel(FINGERPRINT, "made", name, Dtype.BFLOAT16, Dtype.Q8_0, LAYERS)
    n_pages = len(tokens) // PAGE_TOKENS
    out = tuple(sorted(data.draw(st.sets(st.integers(1, max(1, n_pages - 1))))) if n_pages > 1 else ())
    scores = tuple(data.draw(st.lists(st.floats(0, 1), max_size=n_pages)))
    paged_out = PagedOut(data.draw(st.sampled_from(["exact", "qk"])), 8, out, scores) if out else None
    snapshot = lay_out(made, SlotRecord(tokens, created, paged_out=paged_out))
    found = parse(pack(snapshot), snapshot.file_bytes)
    assert found == snapshot
    assert list(found.tokens) == tokens
    assert found.paged_out == paged_out
    check_fits(found, made)


def test_safetensors_reads_it(tmp_path):
    snapshot = lay_out(model(), slot(70))
    data = np.random.default_rng(0).bytes(snapshot.file_bytes - snapshot.data_start)
    path = tmp_path / "made.safetensors"
    path.write_bytes(pack(snapshot) + data)
    with safe_open(path, "np") as file:
        assert set(file.keys()) == {t.name for t in snapshot.tensors}
        for t in snapshot.tensors:
            found = file.get_tensor(t.name)
            assert found.shape == t.shape
            start = t.offset - snapshot.data_start
            assert found.tobytes() == data[start : start + t.n_bytes]
        metadata = file.metadata()
    slot_record = json.loads(metadata["slot"])
    assert slot_record["fingerprint"] == FINGERPRINT
    assert {row[0]: row[7] for row in slot_record["tensors"]}["layers.2.k"] == 55  # the position of its row 0


def test_every_flipped_bit_of_the_header_is_found():
    snapshot = lay_out(model(), slot(3))
    header = pack(snapshot)
    data = bytes(snapshot.file_bytes - snapshot.data_start)
    used = len(header.rstrip()) + 3  # and some of the spaces behind it
    for at in [*range(used), len(header) - 1]:
        for bit in range(8):
            hurt = bytearray(header)
            hurt[at] ^= 1 << bit
            with pytest.raises(SnapshotError) as caught:
                read(hurt + data, snapshot.file_bytes)
            assert caught.value.fault is not Fault.MISFIT, (at, bit)


@pytest.mark.parametrize("change", [-1, -4096, 1])
def test_a_file_of_another_length_than_the_header_says(change):
    snapshot = lay_out(model(), slot())
    with pytest.raises(SnapshotError, match="file length: ") as caught:
        parse(pack(snapshot), snapshot.file_bytes + change)
    assert caught.value.fault is (Fault.TRUNCATED if change < 0 else Fault.DAMAGED)


@pytest.mark.parametrize(
    ("change", "fault", "text"),
    [
        ({"format_version": str(FORMAT_VERSION + 1)}, Fault.NEWER, f"is {FORMAT_VERSION + 1}, this lucevisor reads"),
        ({"format_version": "2"}, Fault.OLDER, "format_version: is 2: made by an earlier version of lucevisor"),
        ({"format_version": "x"}, Fault.FOREIGN, "format_version: is 'x'"),
        ({"format": "pt"}, Fault.FOREIGN, "format: is 'pt'"),
        ({"slot_check": "0" * 64}, Fault.DAMAGED, "slot: does not match its checksum"),
        ({"page_tokens": 32}, Fault.MISFIT, f"page_tokens: is 32, ours is {PAGE_TOKENS}"),
        ({"packed_tokens": None}, Fault.FOREIGN, "missing required field `packed_tokens`"),
        ({"packed_tokens": "!!!"}, Fault.FOREIGN, "slot: is not a record of a slot"),
        ({"packed_tokens": "QQ=="}, Fault.FOREIGN, "tokens: take 1 bytes"),
        ({"dtype": "int3"}, Fault.FOREIGN, "Invalid enum value 'int3'"),
        ({"paged_out": {}}, Fault.FOREIGN, "slot: is not a record of a slot"),
        ({"checksums": {}}, Fault.FOREIGN, "checksums: do not name"),
        ({"tensors": []}, Fault.FOREIGN, "checksums: do not name"),
        ({"unknown": 1}, Fault.DAMAGED, "header: differs from what its slot says"),
    ],
)
def test_invalid_metadata_names_its_key(change, fault, text):
    snapshot = lay_out(model(), slot())
    header = rewritten(pack(snapshot), **change)
    with pytest.raises(SnapshotError) as caught:
        parse(header, snapshot.file_bytes + len(header) - snapshot.data_start)
    assert caught.value.fault is fault
    assert text in str(caught.value)


@settings(max_examples=300)
@given(data=st.data())
def test_a_slot_that_a_program_made_wrong_is_refused_or_holds_what_it_says(data):
    """Bytes of the record changed anywhere, with a checksum that fits: a SnapshotError, never another one."""
    snapshot = lay_out(model(), slot(200, paged_out=PagedOut("qk", 8, (1, 2), (0.5,))))
    record = bytearray(json.loads(pack(snapshot)[8:])["__metadata__"]["slot"].encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(record) - 1))
        record[at] = data.draw(st.sampled_from([record[at] ^ 1, *b'0123456789-eE."{}[],:\\ ']) | st.integers(0, 127))
    header = rewritten(pack(snapshot), slot=record.decode())
    try:
        found = parse(header, snapshot.file_bytes + len(header) - snapshot.data_start)
        check_fits(found, model())
    except SnapshotError:
        return
    assert [(t.name, t.shape) for t in found.tensors] == [(t.name, t.shape) for t in snapshot.tensors]
    assert found.n_tokens == 200


def raw(rows):
    text = json.dumps(rows, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "header",
    [
        raw({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
        raw(
            {
                "__metadata__": {"format": "lucevisor", "format_version": "3"},
                "w" * 100: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            }
        ),
        struct.pack("<Q", 200) + b"x" * 200,
    ],
)
def test_another_safetensors_file_is_foreign(header):
    with pytest.raises(SnapshotError) as caught:
        parse(header, len(header) + 4)
    assert caught.value.fault is Fault.FOREIGN


# ---- does it fit


def test_another_model_is_refused_by_name():
    snapshot = lay_out(model(), slot())
    other = StateModel("cd" * 32, "made", "Made 2B", Dtype.FLOAT32, Dtype.FLOAT32, LAYERS)
    with pytest.raises(SnapshotError, match=r"is that of 'Made 1B' .* running is 'Made 2B'") as caught:
        check_fits(snapshot, other)
    assert caught.value.fault is Fault.OTHER_MODEL


@pytest.mark.parametrize(
    "layers",
    [
        LAYERS[:2],
        (*LAYERS, LayerSpec(4, KvGroup.FULL, {}, attention_state(2, 6, 6))),
        (LAYERS[0], LayerSpec(1, KvGroup.FULL, {}, attention_state(3, 6, 6)), *LAYERS[2:]),
        (*LAYERS[:2], LayerSpec(2, KvGroup.WINDOW, {}, attention_state(1, 8, 8), window=17), LAYERS[3]),
    ],
)
def test_another_shape_of_state_under_the_same_fingerprint_is_refused(layers):
    with pytest.raises(SnapshotError, match="tensor layers") as caught:
        check_fits(lay_out(model(), slot()), model(layers=layers))
    assert caught.value.fault is Fault.MISFIT


def drafter(mark="d" * 64, layers=LAYERS[1:2]):
    return DraftModel(mark, tuple(replace(layer, index=i) for i, layer in enumerate(layers)))


def test_a_drafters_state_is_beside_the_models():
    own = model(draft=drafter())
    snapshot = lay_out(own, slot(10, with_draft=True))
    found = parse(pack(snapshot), snapshot.file_bytes)
    assert found == snapshot
    drafts = [t for t in found.tensors if t.draft]
    assert {t.name for t in drafts} == {"draft.0.k", "draft.0.v"}
    assert {t.layer for t in drafts} == {0}
    assert {t.name for t in found.tensors if not t.draft} == {t.name for t in lay_out(own, slot(10)).tensors}
    assert found.draft_fingerprint == "d" * 64
    check_fits(found, own)
    assert holds_draft(found, own, 10)
    assert holds_draft(found, own, 9)  # its layers attend to all positions: any beginning is good


@pytest.mark.parametrize(
    ("made_with", "runs_with"),
    [
        (drafter(), None),
        (drafter(), drafter("e" * 64, LAYERS[:1])),
        (None, drafter()),
    ],
)
def test_the_models_state_is_usable_without_the_drafters(made_with, runs_with):
    snapshot = lay_out(model(draft=made_with), slot(10, with_draft=True))
    running = model(draft=runs_with)
    check_fits(snapshot, running)
    assert not holds_draft(snapshot, running, 10)


def test_a_drafters_recurrent_state_is_of_one_length():
    recurrent = [layer for layer in LAYERS if layer.kv_group is KvGroup.RECURRENT]
    running = model(draft=drafter(layers=recurrent[:1]))
    snapshot = lay_out(running, slot(10, with_draft=True))
    assert holds_draft(snapshot, running, 10)
    assert not holds_draft(snapshot, running, 9)


# ---- docs/snapshot-format.md


PAGE = (Path(__file__).parents[2] / "docs" / "snapshot-format.md").read_text(encoding="utf-8")


def test_the_example_reads_a_snapshot_of_a_real_model(tmp_path, capsys):
    spec = golden_spec("qwen35")
    pipeline = SlotPipeline(spec)
    pipeline.open(0)
    pipeline.run(0, ids_of(spec, 70))
    store = made_store(tmp_path, state_model(spec), disk_bytes=1 << 30)
    entry = pipeline.save(store, ids_of(spec, 70), checkpoint(pipeline, 0, 5))
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found = {"path": tmp_path / entry.file}
    exec(example, found)
    assert found["tokens"].tolist() == ids_of(spec, 70)
    assert found["keys"].shape == (70, *spec.layers[3].state[0].shape[1:])
    assert "70" in capsys.readouterr().out.splitlines()[-1]
    store.close()
