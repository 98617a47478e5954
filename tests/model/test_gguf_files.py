"""Files and split files: what the gguf package writes is put together again, and a mixed-up set is refused."""

from __future__ import annotations

import os
import shutil
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from lucevisor.model.gguf_files import open_model, part_paths
from lucevisor.model.gguf_header import GgufError
from tests.model import gguf_bytes as raw

N_TENSORS = 7


def write(path: Path, tensors_per_part: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Write ``N_TENSORS`` random tensors with the gguf package, split after ``tensors_per_part`` (0 = not)."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "any", split_max_tensors=tensors_per_part)
    arrays = {f"t.{i}": random.standard_normal((i + 1, 3)).astype(np.float32) for i in range(N_TENSORS)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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
