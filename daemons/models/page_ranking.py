"""Scores of a sequence's pages for KV Flash: each layer adds how much a slice's last queries attend to them."""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.kv.batch import Group
from daemons.ops.paged import PagedTensor, Pages
from lucevisor.model.values import PAGE_TOKENS, Space

QUERIES = 16
"""Last rows of a slice that are asked: the end of a question, where it is short."""


def _complete_sketches(keys: PagedTensor, rows: list[int]) -> None:
    """Make the sketches of pages in host memory that were restored there, and not paged out."""
    assert keys.sketches is not None
    assert keys.host is not None
    missing = [row for row in rows if row in keys.sketches.missing]
    first = 0
    for [parts], index in keys.host.pages.chunks([keys.host], missing):
        k = keys.over(parts).read(Pages(index, len(index), 0, PAGE_TOKENS), torch.float32)
        at = torch.tensor(missing[first : first + len(index)], device=k.device)
        keys.sketches.keep(k, at)
        first += len(index)
    keys.sketches.missing.difference_update(missing)


def rank_pages(keys: PagedTensor, group: Group, q: Tensor, scale: float) -> None:
    """Add one layer's scores of all whole pages before the slices that want them; q [B, n, H, D]."""
    assert keys.sketches is not None
    for b in group.layout.ranked:
        sequence, table = group.layout.sequences[b], group.layout.sequences[b].pages[Space.FULL]
        n_entries = group.layout.starts[b] // PAGE_TOKENS
        out = sorted(entry for entry in sequence.hosts if entry < n_entries)
        resident = sorted({*range(n_entries)}.difference(sequence.out))
        if not n_entries:
            continue
        pages = torch.tensor(table[: len(resident)], dtype=torch.int64, device=q.device)
        rows = torch.tensor([sequence.hosts[entry] for entry in out], dtype=torch.int64, device=q.device)
        _complete_sketches(keys, [sequence.hosts[entry] for entry in out])
        k = keys.read(Pages(pages, len(pages), 0, PAGE_TOKENS), torch.float32)
        found = keys.sketches.scores(q[b, -QUERIES:], k, rows, scale)
        scores = torch.zeros(n_entries, device=q.device)
        scores[torch.tensor([*resident, *out], device=q.device)] = found
        before = group.page_scores.get(sequence.id)
        group.page_scores[sequence.id] = scores if before is None else before + scores
