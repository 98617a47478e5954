"""Records of scoring: tokens for the scoring model of PFlash, and what it found.  No sockets, no tensors."""

from __future__ import annotations

import msgspec


class ScoreWindow(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of a window for the scoring model: ``tokens[i]`` is at position ``start + i``.

    ``start`` 0 begins a window and ends the one before.  ``n_query`` is 0 except with the last tokens of a window:
    the attention of the last ``n_query`` of them, all in this message, is then the score of every token of the window.
    """

    window: int  # number of the window, for the answer
    start: int
    tokens: list[int]
    n_query: int = 0


class WindowScores(msgspec.Struct, frozen=True, array_like=True):
    """Answer to ScoreWindow.  Payload: with a window's last tokens, float32 scores of all its ``n_scores`` tokens."""

    window: int
    n_scores: int
    compute_s: float = 0.0
