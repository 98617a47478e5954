"""A layout without its last rows is that of a shorter slice."""

from __future__ import annotations

import pytest

from daemons.device import CPU
from daemons.kv.batch import Layout
from daemons.kv.fewer_rows import leave_out_rows
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from lucevisor.model.values import Dtype, LayerRange, Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import OpenSequence, Sampling, SetPages, Slice
from tests.families.golden import opened


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(
    ("family", "n", "n_left"),
    [("qwen35", 8, 2), ("qwen35", 8, 7), ("qwen3", 8, 1), ("qwen3", 24, 20), ("qwen3", 24, 16), ("gemma4_e2b", 6, 4)],
)
def test_the_layout_of_the_first_rows(family: str, n: int, n_left: int, *, bounded: bool) -> None:
    spec = opened(family).spec
    sizes = PoolSizes(full_pages=4, window_pages=4, states=30)
    sequences = Sequences([Pools(spec, LayerRange(0, 1), CPU, Dtype.FLOAT32, sizes)], sizes, 2)
    sequences.apply(OpenSequence(9, 0, Sampling()))
    for space in spec.spaces() - {Space.RECURRENT}:
        sequences.apply(SetPages(9, space, 0, [2, 0]))
    states = list(range(n)) if Space.RECURRENT in spec.spaces() else []

    def layout(n_rows: int) -> Layout:
        piece = Slice(9, 60, list(range(1, 1 + n_rows)), True, n_rows - 1, states[:n_rows], draft_from=3)
        return Layout([piece], sequences, spec, bounded=bounded)

    found, wanted = layout(n), layout(n_left)
    leave_out_rows(found, n_left)
    assert (found.n_rows, found.numbers, found.graph_key) == (wanted.n_rows, wanted.numbers, wanted.graph_key)
