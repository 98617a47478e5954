"""Steps without the rows of rejected drafts, which a drafter's context does not need.

Pure.  On a cpu each row takes time; on a GPU a few rows cost nothing, and fewer lengths make fewer graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from lucevisor.protocol.steps import Slice, Step


def without_rejected(step: Step, features: Tensor, tokens: Sequence[Sequence[int]]) -> tuple[Step, Tensor]:
    """The step up to the most accepted drafts of any slice, and its rows of ``features`` [T, n E].

    ``tokens[i]``: sampled for slice i.  Slices of unequal lengths, which are no graph, stay as they are.
    """
    n_rows, n_drafts = len(step.slices[0].tokens), step.slices[0].n_drafts
    n = n_rows - n_drafts - 1 + max((len(sampled) for sampled in tokens), default=0)
    if (
        not n_drafts
        or not 0 < n < n_rows
        or any((len(s.tokens), s.n_drafts) != (n_rows, n_drafts) for s in step.slices)
    ):
        return step, features
    slices = [_begin(s, n) for s in step.slices]
    rows = features[:n] if len(slices) == 1 else features.view(len(slices), n_rows, -1)[:, :n].flatten(0, 1)
    return msgspec.structs.replace(step, slices=slices), rows


def _begin(s: Slice, n: int) -> Slice:
    """The first ``n`` tokens of a slice that ends with drafts."""
    n_cut = len(s.tokens) - n
    return msgspec.structs.replace(
        s, tokens=s.tokens[:n], n_drafts=s.n_drafts - n_cut, states=s.states[: max(0, len(s.states) - n_cut)]
    )
