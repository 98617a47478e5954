"""LoRA adapters: low-rank additions to matrices of a model, from GGUF files as llama.cpp's converter writes them.

``y += scale * alpha / rank * (x A') B'`` for each matrix that a file has a pair ``lora_a``, ``lora_b`` of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import TensorInfo
from lucevisor.model.values import Dtype, dtype_bytes


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The tensors for one matrix [N, K]: ``a`` [rank, K], or [V, rank] of a token table; ``b`` [N, rank]."""

    a: TensorInfo
    b: TensorInfo

    @property
    def rank(self) -> int:
        return self.b.shape[1]

    def n_bytes(self, dtype: Dtype) -> int:
        return sum(dtype_bytes(dtype, prod(tensor.shape)) for tensor in (self.a, self.b))


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """``pairs``: by the name of the model's tensor.  ``alpha`` 0: no division by the rank."""

    name: str
    files: GgufFiles = field(repr=False)
    scale: float
    alpha: float
    pairs: Mapping[str, LoraPair] = field(repr=False)

    def factor(self, pair: LoraPair) -> float:
        return self.scale * self.alpha / pair.rank if self.alpha else self.scale

    def n_bytes(self, dtype: Dtype) -> int:
        return sum(pair.n_bytes(dtype) for pair in self.pairs.values())
