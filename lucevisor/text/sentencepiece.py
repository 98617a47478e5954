"""Byte-pair merges of a SentencePiece vocabulary, which has a score for each token instead.

SentencePiece joins the two neighbours whose token has the highest score, the leftmost ones first.  Each way to make a
token of two others is a merge; merges by descending score join the same neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping


def merges_of_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all merges of tokens into tokens, the first ones first; of one token, the one with the longest left."""
    merges = [
        (-score, -at, token)
        for token, score in scores.items()
        for at in range(1, len(token))
        if token[:at] in scores and token[at:] in scores
    ]
    merges.sort(key=lambda merge: merge[:2])  # equal ones in the order of the vocabulary
    return [(token[:-at], token[-at:]) for _, at, token in merges]
