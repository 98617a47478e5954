"""Sizes of a draft vocabulary: how many of a model's tokens drafts are drawn from, and the bytes that takes."""

from __future__ import annotations

from dataclasses import dataclass

from lucevisor.model.quant_types import GgmlType, WeightFormat, format_bytes


@dataclass(frozen=True, slots=True)
class DraftVocabularySizes:
    """Of ``min_vocabulary`` tokens or more one in ``share`` is drafted, at most ``max_rows``, in ``multiple`` (whole
    tiles)."""

    min_vocabulary: int = 65536
    share: int = 4
    max_rows: int = 65536
    multiple: int = 256  # 16 tiles of 16 rows: kernels that deal tiles out to slabs have whole ones

    def rows(self, vocabulary: int) -> int:
        """Tokens that drafts are drawn from; 0: from all."""
        n = min(self.max_rows, vocabulary // self.share) // self.multiple * self.multiple
        return n if vocabulary >= self.min_vocabulary else 0

    def n_bytes(self, kind: GgmlType, shape: tuple[int, ...], fmt: WeightFormat) -> int:
        """Bytes on the drafter's device beside an output matrix [V, E]; 0 unless that is packed."""
        n = self.rows(shape[0]) if fmt is WeightFormat.PACKED else 0
        return format_bytes(kind, (n, shape[-1]), fmt) + n * 8 if n else 0  # a row has its token id beside it


DRAFT_VOCABULARY = DraftVocabularySizes()
