"""Safetensors header parser: the tensor table of a drafter published as a Hugging Face checkpoint.

As strict as :mod:`lucevisor.model.gguf_header` and with the same records, so that both kinds of files are read alike.
Source: the format's description, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

from math import prod

import msgspec

from lucevisor.model.gguf_files import OpenFile
from lucevisor.model.gguf_header import (
    MAX_DIMENSIONS,
    MAX_NAME_BYTES,
    MAX_TENSORS,
    GgufError,
    TensorInfo,
    check_overlap,
)
from lucevisor.model.quant_types import BY_NAME, DENSE

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(file: OpenFile, part: int) -> dict[str, TensorInfo]:
    """The tensors of an open file, which is file ``part`` of a model.  Raises GgufError."""
    path = str(file.path)
    n = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    start = _LENGTH_BYTES + n
    if not 2 <= n <= MAX_HEADER_BYTES or start > file.n_bytes:
        reason = (
            f"a header of {n} bytes in a file of {file.n_bytes}: this is not a safetensors file, or it is truncated"
        )
        raise GgufError(path, "byte 0", reason)
    raw = file.read(0, start)
    try:
        entries = msgspec.json.decode(raw[_LENGTH_BYTES:], type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise GgufError(path, "header", f"is not a JSON object ({error}): the file is damaged") from None
    file.keep_header(raw)
    entries.pop(_METADATA, None)
    if len(entries) > MAX_TENSORS:
        raise GgufError(path, "header", f"{len(entries)} tensors, at most {MAX_TENSORS} are allowed")
    tensors = [_tensor(path, name, entry, start, file.n_bytes, part) for name, entry in entries.items()]
    check_overlap(path, tensors)
    return {tensor.name: tensor for tensor in tensors}


def _tensor(path: str, name: str, raw: msgspec.Raw, start: int, n_bytes: int, part: int) -> TensorInfo:
    where = f"tensor {name!r}"
    if len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise GgufError(path, where, f"its name has more than {MAX_NAME_BYTES} bytes")
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise GgufError(path, where, f"its entry cannot be read ({error}): the file is damaged") from None
    if entry.dtype not in DENSE:  # whose names are those of the format
        raise GgufError(path, where, f"has dtype {entry.dtype!r}, known are {', '.join(sorted(DENSE))}: convert it")
    kind, (a, b) = BY_NAME[entry.dtype], entry.data_offsets
    if not 1 <= len(entry.shape) <= MAX_DIMENSIONS or min(entry.shape) < 1:
        raise GgufError(path, where, f"has shape {entry.shape}, expected 1 to {MAX_DIMENSIONS} dimensions")
    if a < 0 or b - a != prod(entry.shape) * kind.block_bytes:
        raise GgufError(path, where, f"shape {entry.shape} of {entry.dtype} does not take bytes {a} to {b}")
    if start + b > n_bytes:
        reason = f"its data ends at byte {start + b}, the file at {n_bytes}: the file is truncated, download it again"
        raise GgufError(path, where, reason)
    return TensorInfo(name, kind, tuple(entry.shape), start + a, b - a, part)
