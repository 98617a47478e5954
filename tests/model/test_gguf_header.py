"""The header parser against the gguf package (which we did not write), and against anything a hostile file may hold."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gguf_writing import finish
from lucevisor.model.gguf_files import open_model, part_paths
from lucevisor.model.gguf_header import GgufError, GgufHeader, parse
from tests.model import gguf_bytes as raw

DEMO = Path(__file__).parents[2] / "etc/demo/demo-qwen35-22m-q4_k_m.gguf"
MOST_BYTES_PER_BYTE = 24
"""What parsing may take at its peak, per byte of the header; a Python float or a one-letter key costs that much."""


def read(path: Path) -> tuple[GgufHeader, memoryview]:
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    return parse(data, str(path)), data


def assert_equal_to_the_oracle(path: Path) -> None:
    ours, data = read(path)
    theirs = gguf.GGUFReader(path)
    expected = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata.keys() == expected.keys()
    for key, value in expected.items():
        assert ours.metadata[key] == value, key
    assert ours.data_offset == theirs.data_offset
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert info.shape == tuple(int(n) for n in reversed(t.shape)), t.name
        assert (info.kind.name, info.offset, info.n_bytes) == (t.tensor_type.name, t.data_offset, t.n_bytes), t.name
        assert bytes(data[info.offset : info.offset + info.n_bytes]) == t.data.tobytes(), t.name


def test_a_real_file_reads_as_the_gguf_package_reads_it():
    assert_equal_to_the_oracle(DEMO)


SCALARS = {
    gguf.GGUFValueType.UINT8: st.integers(0, 2**8 - 1),
    gguf.GGUFValueType.INT8: st.integers(-(2**7), 2**7 - 1),
    gguf.GGUFValueType.UINT16: st.integers(0, 2**16 - 1),
    gguf.GGUFValueType.INT16: st.integers(-(2**15), 2**15 - 1),
    gguf.GGUFValueType.UINT32: st.integers(0, 2**32 - 1),
    gguf.GGUFValueType.INT32: st.integers(-(2**31), 2**31 - 1),
    gguf.GGUFValueType.FLOAT32: st.floats(width=32, allow_nan=False),
    gguf.GGUFValueType.UINT64: st.integers(0, 2**64 - 1),
    gguf.GGUFValueType.INT64: st.integers(-(2**63), 2**63 - 1),
    gguf.GGUFValueType.FLOAT64: st.floats(allow_nan=False),
    gguf.GGUFValueType.BOOL: st.booleans(),
    gguf.GGUFValueType.STRING: st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
}
KINDS = [
    gguf.GGMLQuantizationType[n] for n in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")
]


@st.composite
def files(draw: st.DrawFn) -> list[object]:
    """Calls on a GGUFWriter: metadata of every type, tensors of many kinds and shapes."""
    keys = draw(st.lists(st.from_regex(r"[a-z]{1,8}(\.[a-z_]{1,8}){1,2}", fullmatch=True), unique=True, max_size=8))
    metadata = []
    for key in keys:
        kind = draw(st.sampled_from(sorted(SCALARS)))
        if draw(st.booleans()):
            metadata.append((f"x.{key}", draw(st.lists(SCALARS[kind], min_size=1, max_size=6)), kind))
        else:
            metadata.append((f"x.{key}", draw(SCALARS[kind]), kind))
    tensors = []
    for i in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(KINDS))
        block = gguf.GGML_QUANT_SIZES[kind][0]
        shape = [*draw(st.lists(st.integers(1, 3), max_size=3)), block * draw(st.integers(1, 2))]
        tensors.append((f"tensor.{i}", shape, kind, draw(st.integers(0, 255))))
    return [metadata, tensors, draw(st.sampled_from([32, 64, 4096]))]


@settings(max_examples=60, deadline=None)
@given(made=files())
def test_generated_files_read_as_the_gguf_package_reads_them(made, tmp_path_factory):
    metadata, tensors, alignment = made
    path = tmp_path_factory.mktemp("gguf") / "made.gguf"
    writer = gguf.GGUFWriter(path, "any")
    writer.add_custom_alignment(alignment)
    for key, value, kind in metadata:
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=kind)
        else:
            writer.add_key_value(key, value, kind)
    for name, shape, kind, fill in tensors:
        n_blocks, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        data = np.full([*shape[:-1], shape[-1] // n_blocks * n_bytes], fill, np.uint8)
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    assert_equal_to_the_oracle(path)


# ---- what is wrong is named

GOOD_ENTRIES = [
    raw.entry("general.architecture", raw.STRING, "qwen35"),
    raw.entry("a.u32", raw.U32, 7),
    raw.entry("a.flag", raw.BOOL, True),
    raw.array("a.texts", raw.STRING, ["x", "", "yz"]),
    raw.array("a.floats", raw.F32, [1.0, 2.0, 3.0]),
    raw.array("a.flags", raw.BOOL, [True, False]),
]
GOOD_TENSORS = [raw.tensor("w", [4, 2]), raw.tensor("v", [256], 12, 32)]
GOOD = raw.padded(raw.header(GOOD_ENTRIES, GOOD_TENSORS), 32 + 144)

BAD = {
    "not GGUF": (b"GGML" + GOOD[4:], "byte 0", "not b'GGUF'"),
    "empty": (b"", "byte 0", "not a GGUF file"),
    "cut in the counts": (GOOD[:12], "tensor count", "truncated"),
    "cut in a value": (raw.header(GOOD_ENTRIES, [])[:90], "metadata", "truncated"),
    "cut in the data": (GOOD[:-1], "tensor 'v'", "bytes are missing"),
    "version 1": (raw.header([], [], 1), "version", "only 2 and 3"),
    "big-endian": (raw.header([], [], 3 << 24), "version", "big-endian"),
    "absurd tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 19, 0) + bytes(64), "tensor count", "bytes are left"),
    "absurd value count": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(64),
        "metadata count",
        "bytes are left",
    ),
    "absurd string": (raw.header([raw.text("k") + struct.pack("<IQ", raw.STRING, 1 << 62)], []), "'k'", "only 0 bytes"),
    "absurd array": (
        raw.header([raw.text("k") + struct.pack("<IIQ", raw.ARRAY, raw.U8, 1 << 63)], []),
        "'k'",
        "only 0 bytes",
    ),
    "long key": (raw.header([raw.text("k" * 70000) + bytes(8)], []), "metadata key 0", "at most 65535"),
    "key not UTF-8": (raw.header([raw.entry(b"\xff", raw.U8, 1)], []), "metadata key 0", "not UTF-8"),
    "key twice": (raw.header([raw.entry("k", raw.U8, 1)] * 2, []), "'k'", "appears twice"),
    "unknown value type": (raw.header([raw.text("k") + struct.pack("<I", 13)], []), "'k'", "unknown metadata type 13"),
    "arrays without end": (
        raw.header([raw.text("k") + struct.pack("<I", raw.ARRAY) + struct.pack("<IQ", raw.ARRAY, 1) * 64], []),
        "'k'",
        "unknown metadata type 9",
    ),
    "alignment": (raw.header([raw.entry("general.alignment", raw.U32, 3)], []), "general.alignment", "power of two"),
    "alignment a text": (
        raw.header([raw.entry("general.alignment", raw.STRING, "32")], []),
        "general.alignment",
        "power",
    ),
    "tensor twice": (
        raw.padded(raw.header([], [raw.tensor("w", [1]), raw.tensor("w", [1], 0, 32)]), 64),
        "'w'",
        "twice",
    ),
    "no dimension": (raw.padded(raw.header([], [raw.tensor("w", [])]), 64), "'w'", "0 dimensions"),
    "five dimensions": (raw.padded(raw.header([], [raw.tensor("w", [1] * 5)]), 64), "'w'", "5 dimensions"),
    "empty dimension": (raw.padded(raw.header([], [raw.tensor("w", [4, 0])]), 64), "'w'", "dimension of 0"),
    "overflow": (raw.padded(raw.header([], [raw.tensor("w", [2**32, 2**32])]), 64), "'w'", "overflow"),
    "unknown type": (raw.padded(raw.header([], [raw.tensor("w", [4], 99)]), 64), "'w'", "unknown tensor type 99"),
    "part of a block": (
        raw.padded(raw.header([], [raw.tensor("w", [100], 12)]), 64),
        "'w'",
        "not a multiple of the Q4_K block size",
    ),
    "misaligned": (raw.padded(raw.header([], [raw.tensor("w", [4], 0, 8)]), 64), "'w'", "multiple of the alignment"),
    "beyond the file": (raw.padded(raw.header([], [raw.tensor("w", [4], 0, 2**63)]), 64), "'w'", "truncated"),
    "overlap": (
        raw.padded(raw.header([], [raw.tensor("w", [16]), raw.tensor("v", [16], 0, 32)]), 128),
        "'v'",
        "overlaps that of 'w'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_cause(case):
    data, where, reason = BAD[case]
    with pytest.raises(GgufError) as caught:
        parse(memoryview(data), "bad.gguf")
    assert str(caught.value).startswith("bad.gguf: ")
    assert where in caught.value.where
    assert reason in caught.value.reason


# ---- whatever the bytes are


def parse_anything(data: bytes) -> None:
    """Either a header or GgufError, and never more memory than a small multiple of the input."""
    tracemalloc.start()
    try:
        parse(memoryview(data), "fuzz.gguf")
    except GgufError as error:
        str(error).encode("utf-8")  # can be printed
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes <= 64 * 1024 + MOST_BYTES_PER_BYTE * len(data)


INTERESTING = [0, 1, 7, 8, 9, 12, 13, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**62, 2**63, 2**64 - 1]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(4, max(4, len(data) - 9)))
        match draw(st.sampled_from(["byte", "u32", "u64", "cut", "drop", "insert"])):
            case "byte":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "u32":
                data[at : at + 4] = struct.pack("<I", draw(st.sampled_from(INTERESTING)) & 0xFFFFFFFF)
            case "u64":
                data[at : at + 8] = struct.pack("<Q", draw(st.sampled_from(INTERESTING)))
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + draw(st.integers(1, 16))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
    return bytes(data)


@settings(max_examples=1500, deadline=None)
@given(data=damaged())
def test_a_damaged_header_gives_gguferror_or_a_header(data):
    parse_anything(data)


N_LARGE = 20_000
LARGE = {
    "flags": raw.header([raw.array("k", raw.BOOL, [True] * N_LARGE * 8)], []),
    "short texts": raw.header([raw.array("k", raw.STRING, [f"{i:x}" for i in range(N_LARGE)])], []),
    "nested": raw.header(
        [raw.text("k") + struct.pack("<IIQ", raw.ARRAY, raw.ARRAY, N_LARGE) + struct.pack("<IQ", raw.U8, 0) * N_LARGE],
        [],
    ),
    "keys": raw.header([raw.entry(f"{i:x}", raw.U8, i % 256) for i in range(N_LARGE)], []),
    "tensors": raw.padded(raw.header([], [raw.tensor(f"{i:x}", [1], 0, 32 * i) for i in range(N_LARGE)]), 32 * N_LARGE),
}


@pytest.mark.parametrize("case", LARGE)
def test_memory_stays_a_small_multiple_of_the_header(case):
    parse_anything(LARGE[case])


def test_the_total_of_array_values_is_bounded():
    half = raw.text("a") + struct.pack("<IIQ", raw.ARRAY, raw.U8, 1 << 21) + bytes(1 << 21)
    more = raw.text("b") + struct.pack("<IIQ", raw.ARRAY, raw.I16, 1 << 21) + bytes(1 << 22)
    header = parse(memoryview(raw.header([half, more], [])), "m.gguf")
    assert len(header.metadata["b"]) == 1 << 21
    one = raw.array("c", raw.U8, [1])
    with pytest.raises(GgufError, match=r"'c'.*arrays of 4194305 values, at most 4194304"):
        parse(memoryview(raw.header([half, more, one], [])), "m.gguf")


def test_keys_are_bounded():
    entries = [raw.entry(f"k{i}", raw.U8, 1) for i in range((1 << 14) + 1)]
    assert len(parse(memoryview(raw.header(entries[1:], [])), "m.gguf").metadata) == 1 << 14
    with pytest.raises(GgufError, match="16385 metadata values, at most 16384"):
        parse(memoryview(raw.header(entries, [])), "m.gguf")


# ---- files and split files


N_TENSORS = 7


def write(path: Path, tensors_per_part: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Write ``N_TENSORS`` random tensors with the gguf package, split after ``tensors_per_part`` (0 = not)."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "any", split_max_tensors=tensors_per_part)
    arrays = {f"t.{i}": random.standard_normal((i + 1, 3)).astype(np.float32) for i in range(N_TENSORS)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    finish(writer)
    return arrays


@pytest.mark.parametrize("tensors_per_part", [0, 1, 3])
def test_all_parts_form_one_table_with_the_bytes_written(tmp_path, tensors_per_part):
    arrays = write(tmp_path / "m.gguf", tensors_per_part)
    first = min(tmp_path.iterdir())
    assert len(part_paths(first)) == len(list(tmp_path.iterdir()))
    model = open_model(part_paths(first))
    assert model.tensors.keys() == arrays.keys()
    assert model.total_bytes == sum(a.nbytes for a in arrays.values())
    for name, array in arrays.items():
        info = model.tensors[name]
        assert info.shape == array.shape
        assert model.read(info) == array.tobytes()


def test_a_missing_part_is_named(tmp_path):
    write(tmp_path / "m.gguf", 3)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(GgufError, match=r"1 of 3 parts are missing, first m-00002-of-00003\.gguf"):
        part_paths(tmp_path / "m-00001-of-00003.gguf")


@pytest.mark.parametrize("name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-00000.gguf"])
def test_a_part_number_out_of_range_is_rejected(tmp_path, name):
    with pytest.raises(GgufError, match="its name says part"):
        part_paths(tmp_path / name)


def test_a_part_of_another_split_is_refused(tmp_path):
    write(tmp_path / "m.gguf", 4)  # 2 parts
    other = tmp_path / "other"
    other.mkdir()
    write(other / "m.gguf", 1)
    shutil.copy(other / "m-00002-of-00007.gguf", tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(
        GgufError, match=r"m-00002-of-00002\.gguf: metadata value 'split\.count': says 7, but 2 are open"
    ):
        open_model(part_paths(tmp_path / "m-00001-of-00002.gguf"))


def test_a_first_part_that_was_renamed_asks_for_the_others(tmp_path):
    write(tmp_path / "m.gguf", 3)
    (tmp_path / "m-00001-of-00003.gguf").rename(tmp_path / "model.gguf")
    with pytest.raises(GgufError, match=r"split\.count.*says 3, but 1 are open"):
        open_model(part_paths(tmp_path / "model.gguf"))


def split_part(path: Path, names: list[str], total: int) -> None:
    entries = [raw.entry("split.tensors.count", raw.I32, total)]
    path.write_bytes(
        raw.padded(raw.header(entries, [raw.tensor(n, [4], 0, 32 * i) for i, n in enumerate(names)]), 32 * len(names))
    )


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    split_part(tmp_path / "m-00001-of-00002.gguf", ["a", "b"], 4)
    split_part(tmp_path / "m-00002-of-00002.gguf", ["c", "a"], 4)
    with pytest.raises(GgufError, match="tensor 'a': is also in an earlier part"):
        open_model(part_paths(tmp_path / "m-00001-of-00002.gguf"))


def test_a_non_regular_file_is_rejected_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")  # opening it must not wait for a writer
    for path in (tmp_path / "pipe.gguf", tmp_path):
        with pytest.raises(GgufError, match="not a regular file"):
            open_model([path])


def test_a_header_longer_than_the_first_read_is_read_whole(tmp_path):
    tokens = [f"token {i}" for i in range(90_000)]  # 1.9 MB
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "any")
    writer.add_token_list(tokens)
    writer.add_tensor("t", np.arange(5, dtype=np.float32))
    finish(writer)
    model = open_model([tmp_path / "m.gguf"])
    assert model.metadata["tokenizer.ggml.tokens"] == tokens
    assert model.read(model.tensors["t"], 8, 4) == struct.pack("<f", 2)


def test_a_file_truncated_while_open_is_an_error_and_not_a_signal(tmp_path):
    arrays = write(tmp_path / "m.gguf", 0)
    model = open_model([tmp_path / "m.gguf"])
    os.truncate(tmp_path / "m.gguf", model.tensors["t.5"].offset + 4)
    assert model.read(model.tensors["t.4"]) == arrays["t.4"].tobytes()
    with pytest.raises(
        GgufError, match=r"m\.gguf: tensor 't\.5': unexpected end of file: it was truncated after it was opened"
    ):
        model.read(model.tensors["t.5"])


def test_an_open_file_survives_its_replacement(tmp_path):
    arrays = write(tmp_path / "m.gguf", 0)
    model = open_model([tmp_path / "m.gguf"])
    write(tmp_path / "new.gguf", 0, seed=1)
    os.replace(tmp_path / "new.gguf", tmp_path / "m.gguf")
    assert model.read(model.tensors["t.5"]) == arrays["t.5"].tobytes()


def test_identities_reveal_every_change_of_a_part(tmp_path):
    write(tmp_path / "m.gguf", 3)
    paths = sorted(tmp_path.iterdir())
    time.sleep(0.05)  # a tick of the kernel's clock
    model = open_model(paths)
    assert open_model(paths).identities == model.identities
    assert len(set(model.identities)) == len(paths) == 3
    assert model.changed() == model.other_headers() == []
    before = paths[1].stat()
    with paths[1].open("r+b") as file:
        file.seek(model.tensors["t.4"].offset + 20)
        file.write(b"\xff")
    os.utime(paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert paths[1].stat().st_mtime_ns == before.st_mtime_ns
    assert model.changed() == [paths[1]]
    assert [a == b for a, b in zip(open_model(paths).identities, model.identities, strict=True)] == [True, False, True]
    assert model.other_headers() == []
    with paths[0].open("r+b") as file:
        file.write(b"gguf")
    assert model.other_headers() == [paths[0]]
    os.replace(shutil.copy(paths[2], tmp_path / "copy"), paths[2])
    assert paths[2].stat().st_ino != model.identities[2].inode
    assert model.changed() == paths
