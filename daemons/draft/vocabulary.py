"""Embedding and output matrix of a drafter: shared with the output stage where the device holds them for it.

A draft vocabulary: drafts are drawn from the tokens that were used last, so that a draft reads a small part of the
output matrix.

Drafts are guesses, and the model verifies them with its whole matrix: a token that is not in here costs a rejected
draft, and never changes an answer.  The rows stay where they are in memory, as graphs of drafts read them; in place of
tokens that were not used for long, others are copied there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from daemons.device import allocating
from daemons.draft.drafter import VocabularyWeights
from daemons.models.blocks import Output
from daemons.models.loader import ADVICE, WeightLoader
from daemons.models.stage import LoadedStage
from daemons.ops.linear import BlockLinear, DenseLinear, Float32CpuLinear, Linear, Table
from daemons.ops.lora import LoraLinear
from daemons.ops.selection import KernelSelector
from daemons.weights.packed import PackedWeights, empty_packed
from lucevisor.model.drafters.spec import EMBEDDING, DraftSpec, DraftVocabularySizes
from lucevisor.model.quant_types import TILE_ROWS
from lucevisor.model.weight_layout import TensorRole

FEW_TOKENS: Final = 64
"""Tokens up to which numpy takes longer than a loop."""
ROWS_AT_A_TIME: Final = 2048
"""Rows that are copied together: 9 MB of a Q6_K matrix of 5,120 columns."""
NO_ROW: Final = -1


class DraftVocabulary:
    """``lm_head``: the product with ``n_rows`` rows of an output matrix; ``ids`` [n_rows] int64: the token of each.

    At first those are the lowest ids, which come first in a vocabulary made by frequency.
    """

    def __init__(self, whole: PackedWeights, n_columns: int, n_rows: int, selector: KernelSelector) -> None:
        """``n_rows``: a multiple of TILE_ROWS, at most the rows of ``whole``, the matrix of all tokens.

        Raises DeviceError (device, bytes) where memory runs out.
        """
        self.whole, self.n_rows = whole, n_rows
        device, first = whole.tiles.device, whole.tiles[: n_rows // TILE_ROWS]
        with allocating(device, "the draft vocabulary", first.nbytes, ADVICE):
            self.packed = empty_packed(whole.kind, n_rows, n_columns, device)
            self.ids = torch.arange(n_rows, dtype=torch.int64, device=device)
        self.packed.tiles.copy_(first)
        self.lm_head: Linear = selector.packed_linear(self.packed, n_columns)
        self.n_bytes = self.packed.nbytes + self.ids.nbytes
        # Token -> row, in the order of use, the newest last; NO_ROW: it gets one in ``renew`` if it is new enough then.
        self._rows = OrderedDict((token, token) for token in reversed(range(n_rows)))
        self._without_row: dict[int, None] = {}

    def __str__(self) -> str:
        return f"{self.n_rows:,} of {self.whole.n_rows:,} tokens"

    def mark_used(self, tokens: Sequence[int]) -> None:
        """Note that these were used, in this order.  Placeholders, which are negative, and ids that no token has are
        passed over."""
        rows, n_tokens = self._rows, self.whole.n_rows
        for token in tokens if len(tokens) <= FEW_TOKENS else _by_last_use(tokens):
            if token in rows:
                rows.move_to_end(token)
            elif 0 <= token < n_tokens:
                rows[token] = NO_ROW
                self._without_row[token] = None

    def renew(self) -> None:
        """Bring the rows of the ``n_rows`` tokens that were used last to the device, in stream order: before drafts are
        made or a graph of them is replayed."""
        if not self._without_row:
            return
        rows, free = self._rows, list[int]()
        while len(rows) > self.n_rows:
            token, row = rows.popitem(last=False)
            if row == NO_ROW:
                del self._without_row[token]
            else:
                free.append(row)
        new = list(self._without_row)
        self._without_row.clear()
        rows.update(zip(new, free, strict=True))  # they keep their places in the order
        for at in range(0, len(new), ROWS_AT_A_TIME):
            self._write(new[at : at + ROWS_AT_A_TIME], free[at : at + ROWS_AT_A_TIME])

    def _write(self, tokens: Sequence[int], rows: Sequence[int]) -> None:
        moves = torch.tensor([tokens, rows], dtype=torch.int64)
        if self.ids.device.type != "cpu":
            moves = moves.pin_memory().to(self.ids.device, non_blocking=True)
        copy_rows(self.whole, moves[0], self.packed, moves[1])
        self.ids.index_copy_(0, moves[1], moves[0])


def copy_rows(source: PackedWeights, from_rows: Tensor, target: PackedWeights, to_rows: Tensor) -> None:
    """Copy rows [n] of a packed matrix to the rows [n], all different, of another one of the same kind and width.

    Both int64 on the matrices' device, which the host does not wait for.
    """
    from_tile, from_row, to_tile, to_row = (
        index for rows in (from_rows, to_rows) for index in (rows // TILE_ROWS, rows % TILE_ROWS)
    )
    for theirs, ours in zip(source.parts(), target.parts(), strict=True):
        found = theirs.permute(0, 3, 1, 2, 4)[from_tile, from_row]  # [n, chunks, A, B]
        ours.permute(0, 3, 1, 2, 4).index_put_((to_tile, to_row), found)


def draft_vocabulary(
    spec: DraftSpec, lm_head: Linear, selector: KernelSelector, sizes: DraftVocabularySizes
) -> DraftVocabulary | None:
    """Return the draft vocabulary of a drafter with the output matrix ``lm_head``.  Raises DeviceError.

    None, and drafts are drawn from all tokens, where they are few, where the matrix is not packed for a GPU, and for a
    drafter with an output matrix of its own.
    """
    packed = getattr(lm_head, "packed", None)  # PackedLinear, whose module needs Triton
    n_rows = sizes.rows(lm_head.n_out) if spec.shares_lm_head and isinstance(packed, PackedWeights) else 0
    if not n_rows:
        return None
    assert isinstance(packed, PackedWeights)
    return DraftVocabulary(packed, spec.model.hidden_size, n_rows, selector)


def _by_last_use(tokens: Sequence[int]) -> Iterable[int]:
    """Each token once, those that occur last at the end."""
    backwards = np.asarray(tokens, dtype=np.int64)[::-1]
    _, first = np.unique(backwards, return_index=True)
    found: list[int] = backwards[np.sort(first)[::-1]].tolist()
    return found


class SharedWeights(NamedTuple):
    """Weights of the output stage on the drafter's device: the output matrix, and the token table."""

    lm_head: Linear | None = None
    table: Table | None = None


def shared_weights(output_stage: LoadedStage | None, device: torch.device) -> SharedWeights:
    if output_stage is None or output_stage.device != device:
        return SharedWeights()
    output = output_stage.shards[-1].output
    assert isinstance(output, Output)
    tables = (shard.table for shard in output_stage.shards if shard.device == device)
    lm_head = output.lm_head.linear if isinstance(output.lm_head, LoraLinear) else output.lm_head
    return SharedWeights(lm_head, next((t for t in tables if t is not None), None))


def vocabulary_weights(spec: DraftSpec, weights: WeightLoader, shared: SharedWeights) -> VocabularyWeights:
    """Load what ``weights`` has layouts of, and share the rest; see :meth:`DraftSpec.layouts`."""
    roles = {(layout.name, layout.role) for layout in weights.layouts}
    if (EMBEDDING, TensorRole.LOOKUP) in roles or (EMBEDDING, TensorRole.MATRIX) in roles:
        table = weights.table(EMBEDDING)
    elif shared.table is not None:
        table = shared.table
    else:
        assert shared.lm_head is not None
        tensor = weights.files.tensors[EMBEDDING]
        table = weights.selector.table(tensor.kind, _rows(shared.lm_head), tensor.shape[-1])
    if (spec.lm_head, TensorRole.MATRIX) in roles:
        return VocabularyWeights(table, weights.linear(spec.lm_head))
    assert shared.lm_head is not None
    return VocabularyWeights(table, shared.lm_head)


def _rows(lm_head: Linear) -> Tensor | PackedWeights:
    """The rows of a matrix in one of the formats ROW_INDEXED."""
    if isinstance(lm_head, DenseLinear | Float32CpuLinear):
        return lm_head.weight
    if isinstance(lm_head, BlockLinear):
        return lm_head.raw
    packed = getattr(lm_head, "packed", None)  # PackedLinear, whose module needs Triton
    assert isinstance(packed, PackedWeights)
    return packed
