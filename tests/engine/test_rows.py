"""Rows of logits and hidden states: how many fit into a payload, and that none is missing."""

from __future__ import annotations

import pytest

from lucevisor.engine.rows import RowCollector, RowsMissing, max_rows_per_step
from lucevisor.protocol.messages import MAX_PAYLOAD_BYTES


@pytest.mark.parametrize(
    ("vocabulary", "embedding", "n_layers"), [(248_320, 5120, 64), (262_144, 2816, 30), (8192, 384, 8)]
)
def test_as_many_rows_as_fit_and_no_more(vocabulary: int, embedding: int, n_layers: int) -> None:
    for hidden in (False, True):
        row_bytes = 4 * (vocabulary + (embedding * (n_layers + 1) if hidden else 0))
        n = max_rows_per_step(vocabulary, embedding, n_layers, hidden=hidden)
        assert n * row_bytes <= MAX_PAYLOAD_BYTES < (n + 1) * row_bytes


def test_a_text_without_any_step_is_not_complete() -> None:
    with pytest.raises(RowsMissing, match="rows of 0 positions came back for 3 tokens"):
        RowCollector(3, hidden=False).output()
