"""Scores of one tokenizer's tokens on those of another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lucevisor.compression.alignment import aligned

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=60)


@given(lengths, lengths)
def test_places_follow_the_text(of, target):
    found = aligned(list(range(len(of))), of, target)
    assert len(found) == len(target)
    assert found == sorted(found)
    total, wanted = sum(target), []
    for i, length in enumerate(target):
        middle = (sum(target[:i]) + length / 2) / total * sum(of)
        wanted.append(next(j for j in range(len(of)) if sum(of[: j + 1]) >= middle - 1e-9))
    assert all(abs(a - b) <= 1 for a, b in zip(found, wanted, strict=True))
