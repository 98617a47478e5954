"""Scores of a sequence's pages for KV Flash: how much a slice's last queries attend to them, over all layers.

Layers leave their queries in the batch (``Group.ask``), also in a CUDA graph's; this runs behind the layers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from daemons.kv.batch import Batch, Group, Layout
from daemons.kv.slice_group import SliceGroup
from daemons.ops.operations import PageSums
from daemons.ops.page_scores import queries_by_head, scores_of
from daemons.ops.paged import PagedTensor, Pages
from lucevisor.model.values import PAGE_TOKENS, Space


def rank_pages(batch: Batch, layout: Layout, page_sums: PageSums) -> dict[int, Tensor]:
    """Scores float32 [entries] of all whole pages before the slices that want them, by sequence.

    ``batch``: of a step of this shape, in whose groups the layers have left the queries of the step of ``layout``.
    """
    found: dict[int, Tensor] = {}
    for group, of in zip(batch.groups, layout.groups, strict=True):
        for b in of.ranked:
            if of.starts[b] >= PAGE_TOKENS and group.queries:
                found[of.sequences[b].id] = _scores(group, of, b, page_sums)
    return found


def _scores(group: Group, of: SliceGroup, b: int, page_sums: PageSums) -> Tensor:
    """The sum over the layers for one slice."""
    sequence, table = of.sequences[b], of.sequences[b].pages[Space.FULL]
    n_entries, device = of.starts[b] // PAGE_TOKENS, group.starts.device
    out = sorted(entry for entry in sequence.hosts if entry < n_entries)
    resident = sorted({*range(n_entries)}.difference(sequence.out))
    host_rows = [sequence.hosts[entry] for entry in out]
    on_host = torch.from_numpy(np.array([*table[: len(resident)], *host_rows, *resident, *out], dtype=np.int64))
    index = on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)
    pages, rows, order = index.split_with_sizes([len(resident), len(out), len(resident) + len(out)])
    total = torch.zeros(len(order), device=device)
    for keys, q, scale in group.queries:
        assert keys.sketches is not None
        if keys.sketches.missing:
            _complete_sketches(keys, host_rows)
        queries = queries_by_head(q[b], len(keys.sketches.kept.means), scale).contiguous()  # a view without groups
        sums = page_sums.of_keys(queries, keys, pages), page_sums.of_sketches(queries, keys.sketches.kept, rows)
        total += scores_of(torch.cat(sums, dim=-1), len(q[b]))
    return torch.zeros(n_entries, device=device).index_copy_(0, order, total)


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
