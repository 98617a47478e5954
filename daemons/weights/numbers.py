"""Numbers of tensors, of the model's or of the small files beside it, an adapter's or an encoder's."""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.errors import LoadError
from daemons.weights.dequant import dequantise
from daemons.weights.reading import row_count
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import TensorInfo


def decode(files: GgufFiles, tensor: TensorInfo, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of rows ``raw`` uint8 [rows, row_bytes] of a tensor.  Raises LoadError for an unknown type."""
    try:
        return dequantise(tensor.kind, raw, dtype)
    except (NotImplementedError, KeyError, ValueError) as error:  # what gguf-py raises for other types
        reason = f"its type {tensor.kind.name} is not supported ({error})"
        raise LoadError(files.where(tensor), reason, "use a file with another type", configuration=True) from error


def not_finite(files: GgufFiles, tensor: TensorInfo) -> LoadError:
    reason, advice = "it has numbers that are NaN or infinite", "download or convert the file again"
    return LoadError(files.where(tensor), reason, advice, configuration=True)


def read_numbers(files: GgufFiles, tensor: TensorInfo, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a whole tensor on the host.  Raises LoadError, also for numbers that are not finite."""
    raw = torch.frombuffer(bytearray(files.read(tensor)), dtype=torch.uint8).view(row_count(tensor), -1)
    found = decode(files, tensor, raw, dtype).view(tensor.shape)
    if not found.isfinite().all():
        raise not_finite(files, tensor)
    return found
