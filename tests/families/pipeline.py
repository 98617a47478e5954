"""A pipeline of stages in one process over both paged KV groups, with ids dealt out and taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from msgspec.structs import replace
from torch import Tensor

from daemons.models.stage import LoadedStage
from lucevisor.model.extents import extent_of
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.steps import (
    CloseSequence,
    ImageSpan,
    OpenSequence,
    Operation,
    SamplingParams,
    SetPages,
    Slice,
    Step,
    UseState,
    ZeroState,
)

PAGES = 61
STATES = 32
DRAFT_STATES = 48


def pools_of(spec: ModelSpec, host_pages: int = 0, pages: int = PAGES) -> PoolSizes:
    """PoolSizes with only the KV groups that the model has."""
    kv_groups = spec.kv_groups()
    return PoolSizes(
        full_pages=pages if KvGroup.FULL in kv_groups else 0,
        window_pages=PAGES - 8 if KvGroup.WINDOW in kv_groups else 0,
        states=STATES if KvGroup.RECURRENT in kv_groups else 0,
        host_pages=host_pages,
        draft_states=DRAFT_STATES if KvGroup.RECURRENT in kv_groups else 0,
    )


@dataclass(frozen=True)
class How:
    """Number formats, backend and pages of a pipeline.  ``host_pages``: of KV Flash; attention reads them, or with
    ``rank_pages`` ranks them.  ``one_memory``: recurrent states lie in that of pages.
    """

    dtype: Dtype = Dtype.FLOAT32
    kv_dtype: Dtype = Dtype.FLOAT32
    backend: Backend = Backend.CPU
    host_pages: int = 0
    rank_pages: bool = False
    pages: int = PAGES
    one_memory: bool = False
    deterministic: bool = False
    max_attended: int = 0


def load_stages(
    spec: ModelSpec,
    layer_split: Sequence[int] = (),
    how: How | None = None,
    shard_split: Sequence[int] = (),
    captures: Sequence[int] = (),
) -> list[LoadedStage]:
    """One stage per range of ``layer_split``; where it lies in ``shard_split``, a stage's range is cut into shards."""
    how = how or How()
    groups: list[list[ShardPlan]] = [[]]
    for start, stop in pairwise(sorted({0, *layer_split, *shard_split, spec.n_layers})):
        if start in layer_split:
            groups.append([])
        groups[-1].append(ShardPlan(0, LayerRange(start, stop)))
    pools, most = pools_of(spec, how.host_pages, how.pages), {"max_sequences": 16, "max_step_tokens": 512}
    extent = extent_of(spec, how.kv_dtype) if how.one_memory else None
    if extent is not None:
        pools = replace(pools, full_pages=how.pages + STATES * extent.pages, state_pages=extent.pages)
    load = Load(
        [],
        how.dtype,
        how.kv_dtype,
        [],
        [],
        pools,
        **most,
        attend_host=how.host_pages > 0 and not how.rank_pages,
        rank_pages=how.rank_pages,
        deterministic=how.deterministic,
        max_attended=how.max_attended,
    )
    last = len(groups) - 1
    plans = [
        StagePlan(
            i,
            group,
            i - 1 if i else None,
            i if i < last else None,
            embedding=i == 0,
            output=i == last,
            captures=[layer for layer in captures if any(layer in shard.layers for shard in group)],
        )
        for i, group in enumerate(groups)
    ]
    return [LoadedStage.load(spec, plan, load, how.backend, lambda _: None) for plan in plans]


@dataclass
class Text:
    """What the supervisor remembers of a sequence: its length, its state, its pages in each KV group (None: given
    back).
    """

    state: int
    length: int = 0
    kept: list[int] = field(default_factory=list)  # the ids of states after tokens of the last verify slice
    pages: dict[KvGroup, list[int | None]] = field(default_factory=dict)
    images: Mapping[ImageSpan, Tensor] = field(default_factory=dict)


class Pipeline:
    """Runs slices through all stages.  Pages are scattered: neighbours in a text are not neighbours in a pool.

    ``tell_first``: only the first stage is told tokens, as in steps that run ahead of them.
    """

    def __init__(
        self, spec: ModelSpec, stages: list[LoadedStage], *, release: bool = True, tell_first: bool = False
    ) -> None:
        self.spec, self.stages, self.release, self.tell_first = spec, stages, release, tell_first
        kv_groups = spec.kv_groups()
        units, sizes = {KvGroup.FULL: PAGES, KvGroup.WINDOW: pools_of(spec).window_pages}, stages[0].sequences.sizes
        first = {KvGroup.FULL: STATES * sizes.state_pages, KvGroup.WINDOW: 0}  # behind the memory of states
        self.free = {
            kv_group: [first[kv_group] + (i * 37 + 5) % n for i in range(n)]
            for kv_group, n in units.items()
            if kv_group in kv_groups
        }
        self.free_states = [(i * 7 + 3) % STATES for i in range(STATES)]
        self.free_draft_states = [STATES + (i * 7 + 3) % DRAFT_STATES for i in range(DRAFT_STATES)]
        self.texts: dict[int, Text] = {}
        self.hidden: list[Tensor] = []
        self.captures: list[Tensor | None] = []  # of each stage
        self.step = Step(0, 0)  # the last one
        self.rows = torch.empty(0)  # its output
        for stage in stages:
            stage.reset()

    def open(self, sequence: int, images: Mapping[ImageSpan, Tensor] | None = None, adapter: str = "") -> None:
        """``images``: with their embedding rows."""
        state = self.free_states.pop() if KvGroup.RECURRENT in self.spec.kv_groups() else 0
        self.texts[sequence] = Text(state, pages={kv_group: [] for kv_group in self.free}, images=images or {})
        opening = OpenSequence(sequence, state, SamplingParams(), images=(*(images or {}),), adapter=adapter)
        operations: list[Operation] = [opening]
        if KvGroup.RECURRENT in self.spec.kv_groups():
            operations.append(ZeroState(state))
        self.apply(operations)

    def close(self, sequence: int) -> None:
        text = self.texts.pop(sequence)
        for kv_group, pages in text.pages.items():
            self.free[kv_group] += [page for page in pages if page is not None]
        self.free_states.append(text.state)
        self.apply([CloseSequence(sequence)])

    def run(self, *parts: tuple[int, Sequence[int]], want_hidden: bool = False, want_logits: bool = True) -> Tensor:
        """Append tokens to sequences in one step; logits [T, V] of every row, in the order of the parts."""
        verified = [(sequence, tokens, 0) for sequence, tokens in parts]
        return self.verify(*verified, want_hidden=want_hidden, want_logits=want_logits)

    def verify(
        self, *parts: tuple[int, Sequence[int], int], want_hidden: bool = False, want_logits: bool = True
    ) -> Tensor:
        """The same, where the last tokens of each part are drafts, in the number it ends with.  See :meth:`accept`."""
        operations: list[Operation] = []
        slices = []
        for sequence, tokens, n_drafts in parts:
            text = self.texts[sequence]
            if n_drafts and KvGroup.RECURRENT in self.spec.kv_groups():
                ids = self.free_draft_states if len(tokens) == n_drafts + 1 else self.free_states
                text.kept = [text.state] + [ids.pop() for _ in range(n_drafts)]
            slices.append(Slice(sequence, text.length, list(tokens), True, n_drafts, list(text.kept)))
            operations += self._grow(sequence, text, len(tokens))
        step = self.step = Step(1, 0, operations, slices, want_hidden=want_hidden)
        rows: Tensor | None = None
        embeddings = self._embeddings(slices)
        self.hidden, self.captures = [], []
        for stage in self.stages:
            stage.apply(step.operations)
            of_images = {"embeddings": embeddings} if stage.embedding and embeddings is not None else {}
            out = stage.forward(step, rows, **of_images)
            rows = out.rows
            if self.tell_first:
                step = replace(step, slices=[replace(s, tokens=[0] * len(s.tokens)) for s in step.slices])
            self.hidden += out.hidden
            self.captures.append(out.captures)
        assert rows is not None
        self.rows = rows
        return self.stages[-1].logits(rows, None) if want_logits else rows

    def _embeddings(self, slices: list[Slice]) -> Tensor | None:
        found = [
            rows[max(0, s.start - image.start) : max(0, s.start + len(s.tokens) - image.start)]
            for s in slices
            for image, rows in self.texts[s.sequence].images.items()
        ]
        return torch.cat(found) if any(map(len, found)) else None

    def accept(self, sequence: int, n_drafts: int, n_accepted: int) -> None:
        """Keep the first ``n_accepted`` of the ``n_drafts`` of the last step."""
        text = self.texts[sequence]
        text.length -= n_drafts - n_accepted
        if text.kept:
            used = text.kept.pop(n_accepted)
            self.apply([UseState(sequence, used)])
            if used < STATES:
                text.state = used
            else:
                text.kept[0] = used  # free again, and the live one stays
            for state in text.kept:
                (self.free_states if state < STATES else self.free_draft_states).append(state)
            text.kept = []

    def speculate(
        self, sequence: int, prompt: Sequence[int], n: int, draft: Callable[[list[int]], list[int]]
    ) -> list[int]:
        """:meth:`greedy` with drafts: ``draft`` continues what was generated so far."""
        out = [int(self.run((sequence, prompt))[-1].argmax())]
        while len(out) < n:
            drafts = draft(out)[: n - 1 - len(out)]
            found = self.verify((sequence, [out[-1], *drafts], len(drafts))).argmax(dim=-1).tolist()
            right = [a == b for a, b in zip(drafts, found, strict=False)]
            n_accepted = [*right, False].index(False)
            out += found[: n_accepted + 1]
            self.accept(sequence, len(drafts), n_accepted)
        return out

    def _grow(self, sequence: int, text: Text, n: int) -> list[Operation]:
        """Pages for ``n`` more positions; those that no later query sees go back first, and may be dealt out at
        once.
        """
        operations: list[Operation] = []
        for kv_group, pages in text.pages.items():
            if kv_group is KvGroup.WINDOW and self.release:
                for i in range(min(max(0, text.length - self.spec.window + 1) // PAGE_TOKENS, len(pages))):
                    if (page := pages[i]) is not None:
                        self.free[kv_group].append(page)
                        pages[i] = None
            missing = -(-(text.length + n) // PAGE_TOKENS) - len(pages)
            if missing > 0:
                new = [self.free[kv_group].pop() for _ in range(missing)]
                operations.append(SetPages(sequence, kv_group, len(pages), new))
                pages += new
        text.length += n
        return operations

    def run_in_chunks(self, sequence: int, tokens: Sequence[int], size: int) -> Tensor:
        return torch.cat([self.run((sequence, tokens[i : i + size])) for i in range(0, len(tokens), size)])

    def greedy(self, sequence: int, prompt: Sequence[int], n: int) -> list[int]:
        out = [int(self.run((sequence, prompt))[-1].argmax())]
        while len(out) < n:
            out.append(int(self.run((sequence, [out[-1]]))[-1].argmax()))
        return out

    def apply(self, operations: list[Operation]) -> None:
        for stage in self.stages:
            stage.apply(operations)
