"""Attention of the last tokens of a window to each of its tokens (PFlash scores).

Per layer and head, softmax of query times key before rotary positions (a place far away scores like a near one); then
the largest over heads and layers, and the mean over the queries.  Layers with a window are left out: they never saw
the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.models.blocks import Attention, QkNormRope
from daemons.ops.basic import Rope, rotate
from daemons.ops.paged import Pages


class AttentionScores:
    """Collects the scores of one window of ``n`` tokens, whose pages are in order from the first of a pool.

    Call it for each attention layer, when all keys of the window are written, with the queries of the last rows.
    """

    def __init__(self, n: int, n_query: int, pages: Pages, device: torch.device) -> None:
        self._n, self._n_query, self._pages = n, n_query, pages
        self._positions = torch.arange(n, device=device)
        self._unrotate: dict[int, tuple[Tensor, Tensor, float]] = {}
        # row i is the query at position n - n_query + i
        self._hidden = torch.ones(n_query, n, dtype=torch.bool, device=device).triu(n - n_query + 1)
        self._best: Tensor | None = None  # [n_query, n]

    def __call__(self, layer: Attention, queries: Tensor) -> None:
        """``queries`` [T, H, D]: after the rotation."""
        shape = layer.shape
        if shape.window:
            return
        keys = layer.keys.read(self._pages, torch.float32)[0]
        assert isinstance(layer.positions, QkNormRope)
        q = self._before_rotation(layer.positions.rope, queries[-self._n_query :].float(), self._n - self._n_query)
        k = self._before_rotation(layer.positions.rope, keys, 0)
        per_key = shape.n_heads // keys.shape[1]
        scores = torch.einsum("ikgd,jkd->kgij", q.view(self._n_query, -1, per_key, q.shape[-1]), k) * shape.scale
        scores = scores.masked_fill_(self._hidden, float("-inf")).softmax(-1).flatten(0, 1).amax(0)
        self._best = scores if self._best is None else torch.maximum(self._best, scores)

    def result(self) -> Tensor:
        """Float32 scores [n], on the device."""
        assert self._best is not None
        return self._best.mean(0)

    def _before_rotation(self, rope: Rope, x: Tensor, start: int) -> Tensor:
        """Undo the rotation of ``x`` [n, H, D], which begins at ``start``.  A copy."""
        found = self._unrotate.get(id(rope))
        if found is None:
            cos, sin = rope.tables(self._positions)
            found = self._unrotate[id(rope)] = cos, -sin, rope.magnitude**-2
        cos, back, shrink = found
        x = rotate(x.clone(), cos[start : start + len(x)], back[start : start + len(x)])
        if shrink != 1.0:
            x[..., : 2 * cos.shape[-1]].mul_(shrink)
        return x
