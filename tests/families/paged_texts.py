"""Texts whose pages are paged out by the supervisor's own page tables, through real stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from daemons.kv.batch import Group
from daemons.models.stage import LoadedStage
from daemons.ops.paged import Pages
from lucevisor.engine.sequence import grow_table
from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.page_table import PageTable
from lucevisor.kv.residency import Residency, page_table
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.steps import OpenSequence, Operation, SamplingParams, Slice, Step, ZeroState
from tests.families.pipeline import STATES


class Texts:
    """Sequences with page tables of their own, whose slices go through the stages."""

    def __init__(self, spec: ModelSpec, stages: Sequence[LoadedStage], residency: Residency | None) -> None:
        self.spec, self.stages, self.residency = spec, stages, residency
        self.pools = PagePools(self.spec.kv_groups(), stages[0].sequences.sizes)
        self.tables: dict[int, PageTable] = {}
        self.lengths: dict[int, int] = {}
        self.scores: dict[int, list[float]] = {}  # of the last step
        for stage in stages:
            stage.reset()

    def run(self, **parts: Sequence[int]) -> Tensor:
        """Logits [T, V] of a slice of each sequence, in one step."""
        operations: list[Operation] = []
        slices, ranked = [], list[int]()
        for name, tokens in parts.items():
            s, n = ord(name), len(tokens)
            if s not in self.tables:
                self.tables[s] = page_table(self.pools, self.spec.window or None, self.residency)
                self.lengths[s] = 0
                operations.append(OpenSequence(s, s % STATES, SamplingParams()))
                if KvGroup.RECURRENT in self.spec.kv_groups():
                    operations.append(ZeroState(s % STATES))
            table, start = self.tables[s], self.lengths[s]
            found = grow_table(s, table, start, start + n)
            assert found is not None
            operations += found
            if self.residency is not None:
                assert len(table.held(KvGroup.FULL)) <= self.residency.pool_pages
            slices.append(Slice(s, start, list(tokens), True))
            if table.ranks_next:
                ranked.append(s)
            self.lengths[s] += n
        step, rows, self.scores = Step(1, 0, operations, slices, rank_pages=ranked), None, {}
        for stage in self.stages:
            stage.apply(step.operations)
            out = stage.forward(step, rows)
            rows = out.rows
            for one in out.page_scores:
                added = self.scores.setdefault(one.sequence, [0.0] * len(one.scores))
                self.scores[one.sequence] = [a + b for a, b in zip(added, one.scores, strict=True)]
        assert rows is not None
        return self.stages[-1].logits(rows, None)


def tokens_at(start: int, n: int, vocabulary: int) -> list[int]:
    """Some text from a position on."""
    return [(7 * i + i * i // 5) % vocabulary for i in range(start, start + n)]


def run(spec: ModelSpec, stages: Sequence[LoadedStage], chunks: Sequence[int], residency: Residency | None) -> Tensor:
    """Logits [T, V] of a text in slices of these lengths."""
    texts, start, logits = Texts(spec, stages, residency), 0, []
    for n in chunks:
        logits.append(texts.run(a=tokens_at(start, n, spec.vocabulary)))
        start += n
    return torch.cat(logits)


def masked(out: Mapping[int, Collection[int]]) -> object:
    """``Group.keys`` over a whole table, in which the pages that are out by the start of a slice are masked."""
    real = Group.keys

    def keys(group: Group, kv_group: KvGroup, *alike: bool | int) -> tuple[Pages, Tensor | None]:
        pages, mask = real(group, kv_group, *alike)
        start = group.layout.starts[0]
        if kv_group is not KvGroup.FULL or not out[start]:
            return pages, mask
        length = start + group.n_tokens
        shown = torch.ones(1, 1, group.n_tokens, length, dtype=torch.bool) if mask is None else mask
        hidden = torch.tensor([position // PAGE_TOKENS in out[start] for position in range(length)])
        return pages, shown & ~hidden

    return keys
