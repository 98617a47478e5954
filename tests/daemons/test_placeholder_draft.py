"""Where a draft begins whose newest token only the device knows: it picks the case that the host prepared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from daemons.draft.jobs import placeholder_draft
from daemons.kv.batch import Layout

DRAFTS = [11, 12, 13]


def cases(*keys: str) -> list[Layout]:
    """Metadata that says which case it is, behind the token."""
    found = [
        SimpleNamespace(metadata=np.array([0, 70 + i, 5], dtype=np.int64), graph_key=k) for i, k in enumerate(keys)
    ]
    return cast("list[Layout]", found)


@pytest.mark.parametrize(
    ("drawn", "right"), [([9, 12, 13, 4], 0), ([11, 9, 13, 4], 1), ([11, 12, 9, 13], 2), ([11, 12, 13, 4], 3)]
)
def test_drafts_begin_behind_those_that_were_right(drawn: list[int], right: int) -> None:
    found = placeholder_draft(cases("a", "a", "a", "a"), DRAFTS, 2, torch.tensor(drawn))
    assert found is not None
    metadata = torch.zeros(3, dtype=torch.int64)
    found.layout.fill(metadata)
    assert metadata.tolist() == [drawn[right], 70 + right, 5]
    assert found.row.tolist() == [2 + right]


def test_without_drafts_there_is_one_case() -> None:
    found = placeholder_draft(cases("a"), [], 0, torch.tensor([8]))
    assert found is not None
    metadata = torch.zeros(3, dtype=torch.int64)
    found.layout.fill(metadata)
    assert (metadata.tolist(), found.row.tolist()) == ([8, 70, 5], [0])


def test_cases_of_different_graphs_wait_for_the_host() -> None:
    assert placeholder_draft(cases("a", "a", "b", "b"), DRAFTS, 0, torch.tensor([1, 2, 3, 4])) is None
