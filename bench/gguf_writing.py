"""Writing GGUF files, for tests and benchmarks: metadata under the architecture's prefix, and a hole for the data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf
import numpy as np

Value = int | float | bool | str | list[int] | list[bool]
ALIGNMENT = 32
TensorInfo = tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]
"""Name, row-major shape and type."""


def new_file(path: Path, architecture: str, metadata: Mapping[str, Value], *, split: int = 0) -> gguf.GGUFWriter:
    """A writer that has the metadata; ``split``: so many tensors a file."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in metadata.items():
        add_value(writer, f"{architecture}.{key}", value)
    return writer


def add_value(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_bytes(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    """Bytes of a tensor's data."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // block * block_bytes


def aligned(n_bytes: int) -> int:
    """The offset at which data may begin behind so many bytes."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def finish_with_hole(path: Path, writer: gguf.GGUFWriter, tensors: Iterable[TensorInfo]) -> int:
    """Write the header with ``tensors``, and a hole of the size of their data: 16 GB take a few kilobytes of disk.

    Returns where the data begin.
    """
    n_data = 0
    for name, shape, kind in tensors:
        n_bytes = tensor_bytes(shape, kind)
        writer.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes, raw_dtype=kind)
        n_data += aligned(n_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    n_header = aligned(path.stat().st_size)
    os.truncate(path, n_header + n_data)
    return n_header
