"""Whole tensors of the small files beside a model, an adapter's or an encoder's, as numbers on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.errors import LoadError
from daemons.weights.dequant import dequantise
from daemons.weights.reading import row_count
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import TensorInfo


def read_numbers(files: GgufFiles, tensor: TensorInfo, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of the file's shape.  Raises LoadError naming it, for an unknown type and for numbers that are
    not finite.
    """
    where = f"{files.paths[tensor.part]}: tensor {tensor.name!r}"
    rows = torch.frombuffer(bytearray(files.read(tensor)), dtype=torch.uint8).view(row_count(tensor), -1)
    try:
        found = dequantise(tensor.kind, rows, dtype).view(tensor.shape)
    except (NotImplementedError, KeyError, ValueError) as error:  # what gguf-py raises for types it does not know
        reason = f"its type {tensor.kind.name} is not supported ({error})"
        raise LoadError(where, reason, "convert it to f16", configuration=True) from error
    if not found.isfinite().all():
        advice = "download or convert the file again"
        raise LoadError(where, "it has numbers that are NaN or infinite", advice, configuration=True)
    return found
