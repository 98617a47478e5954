"""Embedding and output matrix of a drafter: the target's, shared where the device holds them for the output stage."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from daemons.draft.drafter import VocabularyWeights
from daemons.models.blocks import Output
from daemons.models.loader import WeightLoader
from daemons.models.stage import LoadedStage
from daemons.ops.linear import BlockLinear, DenseLinear, Float32CpuLinear, Linear, Table
from daemons.weights.packed import PackedWeights
from lucevisor.model.drafters.spec import EMBEDDING, DraftSpec
from lucevisor.model.weight_layout import TensorRole


class SharedWeights(NamedTuple):
    """What the output stage has on the drafter's device: the output matrix, and the token table."""

    lm_head: Linear | None = None
    table: Table | None = None


def shared_weights(output_stage: LoadedStage | None, device: torch.device) -> SharedWeights:
    if output_stage is None or output_stage.device != device:
        return SharedWeights()
    output = output_stage.shards[-1].output
    assert isinstance(output, Output)
    tables = (shard.table for shard in output_stage.shards if shard.device == device)
    return SharedWeights(output.lm_head, next((t for t in tables if t is not None), None))


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
