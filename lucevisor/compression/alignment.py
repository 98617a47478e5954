"""Carries scores from the scoring model's tokens to the served model's, by where each token's bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def aligned(scores: Sequence[float], lengths: Sequence[int], target_lengths: Sequence[int]) -> list[float]:
    """Return a score for each target token: that of the token in which its middle lies.

    ``lengths``, ``target_lengths``: bytes of each token of the two.  Normalisation may change how many bytes a text
    has, so places are shares of the whole.
    """
    total, target_total = sum(lengths), sum(target_lengths)
    if not total or not target_total:
        return [0.0] * len(target_lengths)
    ends = [end / total for end in accumulate(lengths)]
    out, at, done = [], 0, 0
    for length in target_lengths:
        middle = (done + length / 2) / target_total
        done += length
        while at < len(ends) - 1 and ends[at] < middle:
            at += 1
        out.append(scores[at])
    return out
