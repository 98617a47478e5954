"""Weights read by several threads at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daemons.errors import LoadError
from daemons.weights import reading
from daemons.weights.reading import Read, StagingBuffers, TensorChunk, shares_of
from lucevisor.model.gguf_files import GgufFiles, open_model
from tests.families.golden import opened


@pytest.fixture
def files() -> GgufFiles:
    files = opened("qwen35").spec.files
    assert files is not None
    return files


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 5))
def test_shares_are_all_bytes_in_order(sizes: list[int], n: int) -> None:
    least, reading.LEAST_SHARE_BYTES = reading.LEAST_SHARE_BYTES, 3
    try:
        tensor = next(iter(opened("qwen35").spec.files.tensors.values()))  # type: ignore[union-attr]
        reads = [Read(memoryview(bytes(size)), tensor, 100 * i) for i, size in enumerate(sizes)]
        shares = shares_of(reads, n)
    finally:
        reading.LEAST_SHARE_BYTES = least
    found = [read.skip + k for share in shares for read in share for k in range(len(read.target))]
    assert found == [read.skip + k for read in reads for k in range(len(read.target))]
    n_bytes = [sum(len(read.target) for read in share) for share in shares]
    assert len(shares) == max(1, min(n, sum(sizes) // 3))
    assert max(n_bytes) - min(n_bytes) <= 1


@pytest.mark.parametrize("n_readers", [1, 2, 4])
def test_several_threads_read_what_one_does(files: GgufFiles, n_readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LEAST_SHARE_BYTES", 1000)
    chunks = []
    for tensor in [*files.tensors.values()][:12]:
        rows = reading.row_count(tensor)
        chunks.append(TensorChunk(tensor, rows // 3, rows, (0, tensor.shape[-1])))
    staging = StagingBuffers(files, torch.device("cpu"), n_readers)
    found = staging.load(chunks)
    for chunk, rows_read in zip(chunks, found, strict=True):
        tensor, row_bytes = chunk.tensor, rows_read.shape[1]
        raw = files.paths[tensor.part].read_bytes()
        start = tensor.offset + chunk.start * row_bytes
        assert rows_read.numpy().tobytes() == raw[start : start + chunk.n_bytes]
    staging.close()


def test_a_file_that_was_cut_is_reported_from_any_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LEAST_SHARE_BYTES", 1000)
    path = tmp_path / "model.gguf"
    path.write_bytes(Path(opened("qwen35").spec.files.paths[0]).read_bytes())  # type: ignore[union-attr]
    files = open_model([path])
    last = max(files.tensors.values(), key=lambda tensor: tensor.offset)
    os.truncate(path, last.offset + last.n_bytes - 8)
    staging = StagingBuffers(files, torch.device("cpu"), 2)
    with pytest.raises(LoadError, match="unexpected end of file"):
        staging.load([TensorChunk(last, 0, reading.row_count(last), (0, last.shape[-1]))])
    staging.close()


@pytest.mark.usefixtures("no_thread_begins")
def test_readers_that_find_no_memory_to_begin_end_the_load(files: GgufFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LEAST_SHARE_BYTES", 1000)
    largest = max(files.tensors.values(), key=lambda tensor: tensor.n_bytes)
    chunk = TensorChunk(largest, 0, reading.row_count(largest), (0, largest.shape[-1]))
    StagingBuffers(files, torch.device("cpu"), 1).load([chunk])  # needs none
    with pytest.raises(MemoryError, match="did not begin"):
        StagingBuffers(files, torch.device("cpu"), 2).load([chunk])
