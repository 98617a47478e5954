"""Steps that rebuild a lost stage: tables and states of the running sequences, then their tokens through its layers.

A new daemon gets the tables as they are after all steps that were planned, then every sequence up to its first slice in
a step that it has to run; these steps follow without their operations.  Rows come from the journal; a stage with the
embedding needs none.  Invariants: no page is written that another sequence, rebuilt before or needed by a waiting step,
reads; every page that a sequence still owns afterwards has been rebuilt, or waiting steps write it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from msgspec.structs import replace

from lucevisor.engine.journal import Journal, RowCopy, pages_between
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.sequence import LiveSequence, RequestRecord
from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.prefix_tree import NO_STATE, PrefixSlot
from lucevisor.model.pages import first_visible_page, pages_of
from lucevisor.model.values import PAGE_TOKENS, Space
from lucevisor.protocol.steps import CopyPage, CopyState, OpenSequence, Operation, SetPages, Slice, Step, ZeroState

FIRST_STEP: Final = 1 << 40
"""Ids of steps that rebuild a stage begin here, where no scheduler's come to."""


class CannotRebuild(Exception):
    """A stage cannot be rebuilt alone, so all stages compute the sequences again.  The message has the reason."""


@dataclass(frozen=True, slots=True)
class RebuildStep:
    """A step for one stage alone.  ``rows``: where the journal has its boundary rows."""

    step: Step
    rows: Sequence[RowCopy] = ()


@dataclass(slots=True)
class RebuildPlan:
    """The steps that rebuild a stage, in order; ``n_tokens`` in all."""

    steps: list[RebuildStep] = field(default_factory=list)
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WaitingSteps:
    """Steps on their way when the stages are rebuilt, by the lost stage that they wait for."""

    by_stage: Mapping[int, Sequence[Step]]

    def first_starts(self) -> dict[int, int]:
        """Return where the first slice of each sequence starts."""
        starts: dict[int, int] = {}
        for step in sorted((s for steps in self.by_stage.values() for s in steps), key=lambda s: s.step_id):
            for slice_ in step.slices:
                starts.setdefault(slice_.sequence, slice_.start)
        return starts

    def behind(self, stage: int) -> list[Step]:
        """Return the steps that ``stage`` had answered before it was lost, in order."""
        answered = [step for at, steps in self.by_stage.items() if at > stage for step in steps]
        return sorted(answered, key=lambda step: step.step_id)


class Rebuilder:
    """Plans the rebuild of stages from the running ``records``.

    ``slots``: those of them that are the beginning of a running sequence, on its pages, come back with it (``kept``).
    """

    def __init__(
        self,
        limits: EngineLimits,
        pools: PagePools,
        journal: Journal,
        records: Sequence[RequestRecord],
        waiting: WaitingSteps,
        n_regions: int,
        slots: Sequence[PrefixSlot] = (),
    ) -> None:
        self._limits, self._pools, self._journal, self._waiting = limits, pools, journal, waiting
        self._n_regions = n_regions
        starts = waiting.first_starts()
        self._stops = {
            record.live: (record, starts.get(record.live.sequence, record.live.n_computed))
            for record in records
            if record.live is not None
        }
        for live, (_, stop) in self._stops.items():
            live.table.slide(stop)  # slots that share what it owns count as whole, and only what is visible is rebuilt
        self._n_steps = 0
        if any(live.table.n_out for live in self._stops):
            raise CannotRebuild("pages of a sequence were paged out: what follows them cannot be computed alone")
        self._check_window_pages()
        self._slots: dict[LiveSequence, list[PrefixSlot]] = {live: [] for live in self._stops}
        for slot in slots:
            self._keep(slot)

    @property
    def kept(self) -> set[PrefixSlot]:
        """The prefix slots that the rebuilt stages hold afterwards."""
        return {slot for slots in self._slots.values() for slot in slots}

    def plan(self, stage: int) -> RebuildPlan:
        """Return the steps that rebuild a stage.  Raises CannotRebuild if rows are missing or pages are too few."""
        plan = RebuildPlan()
        plan.steps.append(RebuildStep(self._step(self._opening(), [])))
        rebuilt: set[int] = set()  # window pages
        for live, (record, stop) in self._stops.items():
            spare = self._spare_pages(live, stop, rebuilt)
            for start, end in self._chunks(stop, {slot.n_tokens for slot in self._slots[live]}):
                tokens = [*record.tokens[start:end]]
                step = self._step(self._window_tables(live, start, end, stop, spare), [
                    Slice(live.sequence, start, tokens, sample=False)
                ])  # fmt: skip
                plan.steps.append(RebuildStep(step, self.rows(stage, step)))
                plan.n_tokens += end - start
                ending = [slot for slot in self._slots[live] if slot.n_tokens == end]
                if copies := [operation for slot in ending for operation in self._copies(live, slot)]:
                    plan.steps.append(RebuildStep(self._step(copies, [])))
            if stop and Space.WINDOW in self._pools:
                plan.steps.append(RebuildStep(self._step(self._tables(live, Space.WINDOW), [])))
                rebuilt.update(page for _, page in self._window_pages(live, stop))
        for step in self._waiting.behind(stage):
            alone = replace(step, step_id=self._next_id(), operations=[])
            plan.steps.append(RebuildStep(alone, self.rows(stage, alone)))
        return plan

    def rows(self, stage: int, step: Step) -> list[RowCopy]:
        """Return where the rows of a step for a stage lie.  Raises CannotRebuild if any is missing."""
        if stage == 0:
            return []
        lives = {live.sequence: live for live in self._stops}
        found_rows: list[RowCopy] = []
        row = 0
        for slice_ in step.slices:
            n = len(slice_.tokens)
            pages = pages_between(lives[slice_.sequence], slice_.start, slice_.start + n)
            copies = self._journal.find_rows(stage - 1, pages, slice_.start, slice_.start + n, row)
            if copies is None:
                raise CannotRebuild(f"the journal lacks rows of positions {slice_.start} to {slice_.start + n - 1}")
            found_rows += copies
            row += n
        return found_rows

    # ---- inside

    def _step(self, operations: list[Operation], slices: list[Slice]) -> Step:
        step_id = self._next_id()
        return Step(step_id, step_id % self._n_regions, operations, slices)

    def _next_id(self) -> int:
        self._n_steps += 1
        return FIRST_STEP + self._n_steps

    def _chunks(self, stop: int, cuts: Collection[int]) -> Iterator[tuple[int, int]]:
        """Yield slices up to ``stop`` that end at ``cuts``, too."""
        yield from pairwise(sorted({*range(0, stop, self._limits.prefill_chunk), *cuts, stop}))

    def _keep(self, slot: PrefixSlot) -> None:
        """Keep a slot if a sequence begins with it, on its whole pages.  Window pages are not rebuilt for slots."""
        n, n_pages = slot.n_tokens, slot.n_tokens // PAGE_TOKENS
        for live, (record, stop) in self._stops.items() if Space.WINDOW not in self._pools else ():
            pages = slot.pages(Space.FULL)[:n_pages] if Space.FULL in self._pools else []
            same = not pages or pages == live.table.entries(Space.FULL, 0, n_pages)
            if 0 < n <= stop and same and record.tokens.n_common(slot.tokens, n) == n:
                self._slots[live].append(slot)
                return

    def _copies(self, live: LiveSequence, slot: PrefixSlot) -> Iterator[Operation]:
        """Yield what gives a slot its own part, when its sequence has just been computed up to its end."""
        if slot.state != NO_STATE:
            yield CopyState(live.state, slot.state)
        for space, page in slot.tail.items():
            [source] = live.table.entries(space, slot.n_tokens // PAGE_TOKENS, slot.n_tokens // PAGE_TOKENS + 1)
            if source != page:
                yield CopyPage(space, source, page, slot.n_tokens % PAGE_TOKENS)

    def _opening(self) -> list[Operation]:
        operations: list[Operation] = []
        for live, (record, _) in self._stops.items():
            request = record.request
            opening = OpenSequence(
                live.sequence, live.state, request.sampling, mu=record.mu, n_prompt=len(request.prompt)
            )
            operations.append(opening)
            if live.state != NO_STATE:
                operations.append(ZeroState(live.state))
            for space in (Space.FULL, Space.WINDOW):
                operations += self._tables(live, space)
        return operations

    def _tables(self, live: LiveSequence, space: Space) -> list[Operation]:
        if space not in self._pools:
            return []
        known = live.table.known(space)
        return [SetPages(live.sequence, space, known.first, known.pages)] if known.pages else []

    # ---- window pages: a sequence needs those it has released again while it is computed from the start

    def _check_window_pages(self) -> None:
        """Raise CannotRebuild if waiting steps of a sequence see or write a page, released meanwhile, that is rebuilt
        for another one."""
        if Space.WINDOW not in self._pools:
            return
        rebuilt: dict[int, list[LiveSequence]] = {}
        for live, (_, stop) in self._stops.items():
            for _, page in self._window_pages(live, stop):
                rebuilt.setdefault(page, []).append(live)
        for live, (_, stop) in self._stops.items():
            held = set(live.table.held(Space.WINDOW))
            for page in self._visible_pages(live, stop):
                for other in rebuilt.get(page, ()):
                    if other is not live and not (page in held and page in other.table.held(Space.WINDOW)):
                        raise CannotRebuild(
                            "a window page was given to another sequence while steps waited for the stage"
                        )

    def _visible_pages(self, live: LiveSequence, stop: int) -> list[int]:
        """Return the pages that tokens at ``stop`` and after it attend to or write."""
        assert self._limits.window_tokens is not None
        known = live.table.known(Space.WINDOW)
        return known.pages[max(0, first_visible_page(stop, self._limits.window_tokens) - known.first) :]

    def _window_pages(self, live: LiveSequence, stop: int) -> list[tuple[int, int]]:
        """Return the entries below ``stop`` that a token there attends to, and their pages."""
        assert self._limits.window_tokens is not None
        known, first = live.table.known(Space.WINDOW), first_visible_page(stop, self._limits.window_tokens)
        entries = range(max(first, known.first), pages_of(stop))
        return [(entry, known.pages[entry - known.first]) for entry in entries]

    def _spare_pages(self, live: LiveSequence, stop: int, rebuilt: set[int]) -> list[int]:
        """Return window pages that may hold what the sequence has released, until others are rebuilt."""
        if Space.WINDOW not in self._pools:
            return []
        needed = {page for _, page in self._window_pages(live, stop)}
        return [page for page in self._pools[Space.WINDOW].ids if page not in rebuilt and page not in needed]

    def _window_tables(self, live: LiveSequence, start: int, end: int, stop: int, spare: list[int]) -> list[Operation]:
        """Return the window table for a chunk of a sequence that is rebuilt up to ``stop``: its own pages from the last
        window on, spare ones, used in turn, before."""
        window = self._limits.window_tokens
        if window is None:
            return []
        first, last = first_visible_page(start, window), pages_of(end)
        known = live.table.known(Space.WINDOW)
        first_own = max(known.first, first_visible_page(stop, window))
        n_spare = min(last, first_own) - first
        if n_spare <= 0:
            return []
        if n_spare > len(spare):
            raise CannotRebuild(f"{n_spare} window pages are needed for a while, {len(spare)} are there")
        pages = [spare[entry % len(spare)] for entry in range(first, first + n_spare)]
        return [SetPages(live.sequence, Space.WINDOW, first, pages)]
