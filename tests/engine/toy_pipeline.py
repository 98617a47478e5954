"""The daemons' side of a pipeline in memory: test equipment for the pure core of the engine.

It executes real encoded steps on a toy model of which every stage keeps pages, windows and recurrent states by id, as
real shards do, and never looks anything up by request.  A wrong page table, a page given away too early, a missing
ZeroState, a reused region or a token counted twice changes the tokens that come out.  ``alone`` is the same model
without pages, batches or steps: the oracle.  A rule between supervisor and daemons that is broken raises Violation.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from itertools import accumulate
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from lucevisor.engine.journal import RowCopy
from lucevisor.engine.recovery import FIRST_STEP
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.connection import Connection
from lucevisor.protocol.frames import POSTED, encode, payload_segments
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.messages import Role
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import (
    PENDING,
    CancelPending,
    CloseSequence,
    CopyPage,
    CopyState,
    DraftStep,
    Masks,
    OpenSequence,
    Operation,
    PageIn,
    PageOut,
    PageScores,
    PendingCancelled,
    PromptLogprobs,
    Sampled,
    SamplingParams,
    SetPages,
    Slice,
    Step,
    StepResult,
    UseState,
    ZeroState,
)

VOCABULARY = 97
_MASK = (1 << 61) - 1
_POISON = 0xDEAD  # what a state holds before anybody has set it
_EMPTY = (-1, _POISON)  # what a page holds: at each offset the position it was written for, and a value
_NO_PAYLOAD = memoryview(b"")
_NO_PAGE = -1  # entry of a window table that starts behind its beginning
_OUT = -2  # entry of a full table that was paged out
Regions = dict[tuple[int, int], tuple[int, list[int]]]
"""By boundary and region: the step that wrote the rows, and the rows."""
TOKENS = -1
"""In place of a boundary: by step, the tokens that the last stage told the first one."""
DRAFTS = -2
"""Likewise the drafts behind a step: of each sequence its id, their number, and them."""
MADE = -3
"""Minus a stage, likewise the rows that it made of a step."""
PLACED = -1
"""In place of a step: the journal wrote the rows."""


class Violation(AssertionError):
    """The supervisor broke a rule that daemons rely on."""


def mix(*numbers: int) -> int:
    """A number that depends on all arguments and their order."""
    value = 0x9E3779B9
    for number in numbers:
        value = ((value ^ number) * 0x100000001B3 + 0x9E3779B97F4A7C15) & _MASK
        value ^= value >> 29
    return value


def draw(
    row: int, sampling: SamplingParams, position: int, counts: int, allowed: Sequence[int] = range(VOCABULARY)
) -> int:
    """The token after a row: a function of (seed, position, row), of what was counted for the penalties, if any, and of
    the allowed ids."""
    return allowed[mix(row, sampling.seed, position, counts if sampling.penalised else 0) % len(allowed)]


class ToyConstraint:
    """Which ids may follow depends on all before; one in three is allowed."""

    row_bytes = -(-VOCABULARY // 8)

    def __init__(self, seed: int, fails_at: int = -1) -> None:
        self._seed, self._fails_at = seed, fails_at
        self._output: list[int] = []

    @property
    def n_tokens(self) -> int:
        return len(self._output)

    def n_valid(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        output = [*self._output[:start], *tokens]
        return next((i for i, t in enumerate(drafts) if t not in self.allowed([*output, *drafts[:i]])), len(drafts))

    def masks(self, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> bytearray:
        if start > len(self._output):
            raise Violation(f"output from {start} on, {len(self._output)} tokens are known")
        for token in tokens[len(self._output) - start :]:
            if token not in self.allowed(self._output):
                raise Violation(f"{token} is not allowed after {self._output}")
            self._output.append(token)
        if len(self._output) == self._fails_at:
            raise RuntimeError("too much work")
        return bytearray().join(self._row([*self._output, *drafts[:i]]) for i in range(1 + len(drafts)))

    def allowed(self, output: Sequence[int]) -> list[int]:
        """The ids that may follow an output."""
        state = mix(self._seed, *output)
        return [t for t in range(VOCABULARY) if mix(state, t) % 3 == 0 or t == state % VOCABULARY]

    def _row(self, output: Sequence[int]) -> bytes:
        allowed = np.zeros(8 * self.row_bytes, dtype=np.uint8)
        allowed[self.allowed(output)] = 1
        return np.packbits(allowed, bitorder="little").tobytes()


@dataclass(frozen=True)
class ToyModel:
    """``window``: positions that a window layer sees, itself included; None without such layers.  ``attends_host``:
    full layers see what was paged out to host memory.
    """

    n_stages: int
    kv_groups: frozenset[KvGroup]
    window: int | None
    attends_host: bool = False

    def alone(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        n_tokens: int,
        stop_ids: frozenset[int],
        constraint: ToyConstraint | None = None,
        rows: list[int] | None = None,
    ) -> list[int]:
        """What the model generates for one request, the stop id included, computed without pages or batches.

        ``rows`` gets those of the last stage.
        """
        tokens = list(prompt)
        kept: list[list[int]] = [[] for _ in range(self.n_stages)]
        totals = [0] * self.n_stages
        states = [0] * self.n_stages
        row = 0
        for i in range(len(prompt) + n_tokens):
            if i == len(tokens):
                counts = 0
                if sampling.penalised:
                    counts = sum(mix(t, at >= len(prompt)) for at, t in enumerate(tokens)) & _MASK
                allowed = range(VOCABULARY) if constraint is None else constraint.allowed(tokens[len(prompt) :])
                tokens.append(draw(row, sampling, i, counts, allowed))
                if tokens[i] in stop_ids or len(tokens) == len(prompt) + n_tokens:
                    break
            row = mix(tokens[i], i)
            for stage in range(self.n_stages):
                kept[stage].append(mix(row, i, stage))
                totals[stage] += kept[stage][-1]
                states[stage] = mix(states[stage], row)
                parts = [row]
                if KvGroup.FULL in self.kv_groups:
                    parts.append(totals[stage])
                if self.window is not None:
                    parts.append(sum(kept[stage][-self.window :]))
                if KvGroup.RECURRENT in self.kv_groups:
                    parts.append(states[stage])
                row = mix(*parts)
            if rows is not None:
                rows.append(row)
        return tokens[len(prompt) :]


@dataclass
class _Open:
    state: int
    sampling: SamplingParams
    n_prompt: int  # tokens of the prompt that were not counted yet
    counts: int = 0
    n_tokens: int | None = None  # not known before the first slice: it may begin with what a prefix slot holds
    n_drafts: int = 0  # of them, those of the last slice that the next one may take back
    states: list[int] = field(default_factory=list)  # after tokens of the last slice, not made yet
    rebuilt: bool = False  # its last slice was computed again, in a step of this stage alone
    drawn: tuple[int, int] | None = None  # the token drawn last and its position
    tables: dict[KvGroup, list[int]] = field(default_factory=dict)
    hosts: dict[int, int] = field(default_factory=dict)  # by entry: its page in host memory

    def count(self, tokens: Sequence[int]) -> None:
        """Count tokens of the context for the penalties: those of the prompt and those of the output apart."""
        self.counts = (self.counts + sum(mix(t, i >= self.n_prompt) for i, t in enumerate(tokens))) & _MASK
        self.n_prompt = max(0, self.n_prompt - len(tokens))

    def is_out(self, kv_group: KvGroup, position: int) -> bool:
        """Whether the page of a position was paged out."""
        entry, table = position // PAGE_TOKENS, self.tables.get(kv_group, [])
        return entry < len(table) and table[entry] == _OUT


def pending_of(piece: Slice) -> list[int]:
    """What a slice was sent without, now that it is known."""
    return piece.drafts or piece.tokens


class ToyStage:
    """One stage: its pools, its sequences, its boundary regions (``regions`` is shared with its neighbours)."""

    def __init__(self, model: ToyModel, stage: int, pools: PoolSizes, regions: Regions):
        self.model, self.stage, self.regions = model, stage, regions
        sizes = {KvGroup.FULL: pools.full_pages, KvGroup.WINDOW: pools.window_pages}
        self.pages = {kv_group: [[_EMPTY] * PAGE_TOKENS for _ in range(n)] for kv_group, n in sizes.items()}
        ids = range(pools.full_pages, pools.full_pages + pools.host_pages)
        self.host_pages = {page: [_EMPTY] * PAGE_TOKENS for page in ids}
        self.states = {i: _POISON for i in range(pools.n_state_ids) if not pools.is_draft_state(i)}
        self.updates: dict[int, int] = {}  # what a token of a verify slice does, by the id of the state after it
        self.pools = pools
        self.sequences: dict[int, _Open] = {}
        self.sampled: dict[int, list[Sampled]] = {}  # by step, for a drafter in the same daemon
        self.known: dict[int, list[Slice]] = {}  # slices with the tokens they started from, by step, for that drafter

    def run(
        self, step: Step, max_sequences: int, masks: np.ndarray | None = None
    ) -> tuple[StepResult, list[np.ndarray]]:
        """Execute a step; the payload arrays come along.  ``masks``: of its masked slices, a bit a token."""
        n_masked = 0
        self.operate(step, max_sequences)
        told = self._told(step)
        pending = [piece.sequence for piece in step.slices if PENDING in piece.tokens]
        step = replace(step, slices=[self._known(piece, told) for piece in step.slices])
        named = [s.sequence for s in step.slices]
        if len(named) != len(set(named)):
            raise Violation(f"step {step.step_id} carries two slices of a sequence: {named}")
        rows_in = (
            self._read_region(step)
            if self.stage and step.slices
            else [mix(t, s.start + i) for s in step.slices for i, t in enumerate(s.tokens)]
        )
        rows_out: list[int] = []
        sampled = []
        for piece in step.slices:
            rows = self._slice(piece, rows_in[len(rows_out) : len(rows_out) + len(piece.tokens)])
            self.sequences[piece.sequence].rebuilt = step.step_id >= FIRST_STEP
            rows_out += rows
            if self.stage == self.model.n_stages - 1:
                own = None
                if piece.masked:
                    if masks is None:
                        raise Violation(f"step {step.step_id} has no masks")
                    own = masks[n_masked : n_masked + 1 + piece.n_drafts]
                    n_masked += len(own)
                sampled += self._sample(self.sequences[piece.sequence], piece, rows, own)
        if masks is not None and n_masked != len(masks):
            raise Violation(f"step {step.step_id} has {len(masks)} masks for {n_masked} rows")
        self.sampled[step.step_id], self.known[step.step_id] = sampled, step.slices
        if self.stage and self.stage == self.model.n_stages - 1:
            newest = {one.sequence: one.token for one in sampled}
            numbers = [number for pair in newest.items() for number in pair]
            self.regions[TOKENS, step.step_id] = (step.step_id, numbers)
        if told is not None:
            sampled = [Sampled(s.sequence, t) for s in step.slices if s.sequence in pending for t in pending_of(s)]
        if step.slices:
            self.regions[self.stage, step.region] = (step.step_id, rows_out)
            self.regions[MADE - self.stage, step.step_id] = (step.step_id, rows_out)
        arrays, segments = self._payload(step, rows_in, rows_out)
        scores = [
            PageScores(s.sequence, [float(mix(s.start, i, self.stage) % 97) for i in range(s.start // PAGE_TOKENS)])
            for s in step.slices
            if s.sequence in step.rank_pages
        ]
        scored = [
            PromptLogprobs(
                s.sequence, s.start + 1, [-float(token) for token in s.logprob_targets], [[] for _ in s.logprob_targets]
            )
            for s in step.slices
            if s.logprob_targets and self.stage == self.model.n_stages - 1
        ]
        times = {"compute_s": 0.25, "wait_s": 0.5}
        result = StepResult(
            step.step_id, self.stage, sampled, **times, segments=segments, page_scores=scores, prompt_logprobs=scored
        )
        return result, arrays

    def operate(self, step: Step, max_sequences: int) -> None:
        """Execute the operations of a step."""
        for operation in step.operations:
            self._operate(operation)
            if len(self.sequences) > max_sequences:
                raise Violation(f"{len(self.sequences)} sequences are open, {max_sequences} were announced")

    def has_rows(self, step: Step) -> bool:
        """Whether the stage before has rung for a step; for the first one, the last has for what that starts from."""
        if self.stage == 0:
            return (
                (TOKENS, step.depends_on_step) if step.depends_on_step else (DRAFTS, step.drafts_of)
            ) in self.regions
        return not step.slices or self.regions.get((self.stage - 1, step.region), (0, []))[0] == step.step_id

    def tell_drafts(self, step_id: int, drafts: Mapping[int, Sequence[int]]) -> None:
        """Tell the first stage the drafts behind a step, if that is another one."""
        if self.stage:
            numbers = [number for sequence, own in drafts.items() for number in (sequence, len(own), *own)]
            self.regions[DRAFTS, step_id] = (step_id, numbers)

    def _told(self, step: Step) -> dict[int, list[int]] | None:
        """What the last stage told the first one, if a step needs it."""
        if self.stage or not step.waits_for_tokens:
            return None
        if step.depends_on_step:
            numbers = self.regions[TOKENS, step.depends_on_step][1]
            return {sequence: [token] for sequence, token in zip(numbers[::2], numbers[1::2], strict=True)}
        rest, told = [*self.regions[DRAFTS, step.drafts_of][1]], dict[int, list[int]]()
        while rest:
            sequence, n = rest[:2]
            told[sequence], rest = rest[2 : 2 + n], rest[2 + n :]
        return told

    def _known(self, piece: Slice, told: dict[int, list[int]] | None) -> Slice:
        """A slice whose token the step before has drawn, or behind which drafts were made."""
        if PENDING not in piece.tokens:
            return piece
        if told is not None and piece.drafts_pend:
            if piece.sequence not in told:
                raise Violation(f"the first stage waits for drafts of sequence {piece.sequence} behind another step")
            return piece.with_drafts(told[piece.sequence])
        if told is not None:
            return replace(piece, tokens=told[piece.sequence])
        if 0 < self.stage < self.model.n_stages - 1:  # it gets rows
            return replace(piece, tokens=[0 if token == PENDING else token for token in piece.tokens])
        if piece.drafts_pend:
            raise Violation(f"nobody knows the drafts {piece.drafts} of sequence {piece.sequence}")
        if piece.tokens != [PENDING] or self.stage + 1 < self.model.n_stages or piece.sequence not in self.sequences:
            raise Violation(f"nobody knows the tokens {piece.tokens} of sequence {piece.sequence}")
        token, position = self.sequences[piece.sequence].drawn or (0, -1)
        if position != piece.start:
            raise Violation(
                f"sequence {piece.sequence} goes on at {piece.start}, the last token drawn is at {position}"
            )
        return replace(piece, tokens=[token])

    def take_over(self, other: ToyStage, units: Mapping[KvGroup, Sequence[int]]) -> None:
        """Hold in these pages and states what another process of this stage held."""
        for kv_group, ids in units.items():
            for i in ids:
                if kv_group is KvGroup.RECURRENT:
                    self.states[i] = other.states[i]
                elif kv_group is KvGroup.FULL and i in self.host_pages:
                    self.host_pages[i] = list(other.host_pages[i])
                else:
                    self.pages[kv_group][i] = list(other.pages[kv_group][i])

    def replay(self, steps: Sequence[Step], rows: Sequence[int], max_sequences: int) -> None:
        """Run steps that were prepared for this stage; ``rows``: of the stage before, one step behind the other."""
        shared, self.regions = self.regions, {}
        at = 0
        for step in steps:
            n = sum(len(piece.tokens) for piece in step.slices)
            self.regions[self.stage - 1, step.region] = (PLACED, [*rows[at : at + n]])
            self.run(step, max_sequences)
            at += n
        self.regions = shared

    def _sample(self, sequence: _Open, piece: Slice, rows: list[int], masks: np.ndarray | None) -> list[Sampled]:
        """Draw after the last token, or, of a slice with drafts, after each one up to the first that is wrong."""
        sure = len(piece.tokens) - piece.n_drafts
        sequence.count(piece.tokens[:sure])
        sampled: list[Sampled] = []
        for i in range(sure, len(piece.tokens) + 1) if piece.sample else ():
            allowed = range(VOCABULARY) if masks is None else np.flatnonzero(masks[i - sure]).tolist()
            token = draw(rows[i - 1], sequence.sampling, piece.start + i, sequence.counts, allowed)
            sampled.append(Sampled(piece.sequence, token))
            sequence.drawn = token, piece.start + i
            if i == len(piece.tokens) or piece.tokens[i] != token:
                break
            sequence.count([token])
        return sampled

    def _read_region(self, step: Step) -> list[int]:
        step_id, rows = self.regions[self.stage - 1, step.region]
        if step_id not in (step.step_id, PLACED):
            raise Violation(
                f"region {step.region} was overwritten by step {step_id} before step {step.step_id} was read"
            )
        return rows

    def _operate(self, operation: object) -> None:
        match operation:
            case OpenSequence(sequence=sequence, state=state, sampling=sampling, history=history, n_prompt=n_prompt):
                if sequence in self.sequences:
                    raise Violation(f"sequence {sequence} is opened while it is open")
                self._check_live(state)
                self.sequences[sequence] = _Open(state, sampling, n_prompt)
                self.sequences[sequence].count(history)
            case CloseSequence(sequence=sequence):
                closed = self.sequences.pop(sequence, None)
                if closed is None:
                    raise Violation(f"sequence {sequence} is closed but not open")
                self._settle(closed, closed.state)
            case SetPages(sequence=sequence, kv_group=kv_group, first=first, pages=pages):
                if sequence not in self.sequences:
                    raise Violation(f"pages are set for sequence {sequence}, which is not open")
                table = self.sequences[sequence].tables.setdefault(kv_group, [])
                if (first > len(table) and kv_group is not KvGroup.WINDOW) or not pages:
                    raise Violation(
                        f"sequence {sequence}: entries {first} + {len(pages)} leave a gap behind {len(table)}"
                    )
                if not all(0 <= page < len(self.pages[kv_group]) for page in pages):
                    raise Violation(f"pages {pages} are outside the pool of KV group {kv_group}")
                table += [_NO_PAGE] * (first - len(table))
                table[first : first + len(pages)] = pages
            case PageOut():
                self._page_out(operation)
            case PageIn(sequence=sequence, entries=entries, pages=pages):
                self._page_in(self.sequences[sequence], entries, pages)
            case UseState(sequence=sequence, state=state):
                opened = self.sequences.get(sequence)
                if opened is None or not (state in opened.states or opened.rebuilt):
                    raise Violation(f"state {state} is not one that the last slice of sequence {sequence} left")
                self._settle(opened, state)
            case ZeroState(state=state):
                self._check_live(state)
                self._set_state(state, 0)
            case CopyState(source=source, target=target):
                self._check_live(min(source, target))
                if not {source, target} <= self.states.keys():
                    raise Violation(f"state {source} is copied to {target}, and one of them is nowhere whole")
                for opened in self.sequences.values():
                    if source in opened.states:
                        left, opened.states = opened.states[1:], opened.states[:1]
                        self._settle(opened, source)
                        opened.states = left
                self._set_state(target, self.states[source])
            case CopyPage(kv_group=kv_group, source=source, target=target, n_tokens=n):
                if source == target or not 0 < n <= PAGE_TOKENS:
                    raise Violation(f"{n} positions of page {source} are copied to {target}")
                self._use_page(kv_group, target)[:n] = self.pages[kv_group][source][:n]
            case other:
                raise Violation(f"an operation nobody plans: {other}")

    def _page_in(self, sequence: _Open, entries: list[int], pages: list[int]) -> None:
        for entry, page in zip(entries, pages, strict=True):
            if entry not in sequence.hosts or not 0 <= page < len(self.pages[KvGroup.FULL]):
                raise Violation(f"entry {entry} cannot come back to page {page}")
            self.pages[KvGroup.FULL][page] = list(self.host_pages[sequence.hosts.pop(entry)])
            sequence.tables[KvGroup.FULL][entry] = page

    def _page_out(self, operation: PageOut) -> None:
        sequence, entries = self.sequences[operation.sequence], operation.entries
        table = sequence.tables.setdefault(KvGroup.FULL, [])
        for i, entry in enumerate(entries):
            if entry > len(table) or (entry < len(table) and table[entry] < 0):
                raise Violation(f"sequence {operation.sequence}: entry {entry} of {len(table)} cannot be paged out")
            if entry == len(table):  # known to have left before
                table.append(_OUT)
            elif operation.hosts and self.host_pages:
                self.host_pages[operation.hosts[i]] = list(self.pages[KvGroup.FULL][table[entry]])
            table[entry] = _OUT
            if operation.hosts:
                sequence.hosts[entry] = operation.hosts[i]

    def _check_live(self, state: int) -> None:
        if state >= self.pools.device_states:
            where = "after a draft" if self.pools.is_draft_state(state) else "in host memory"
            raise Violation(f"state {state} is one {where}: no sequence can have it")

    def _settle(self, sequence: _Open, state: int) -> None:
        """Make a state that the last slice of a sequence left, if it is one, in the place of the sequence's own."""
        for left in sequence.states[: sequence.states.index(state) + 1] if state in sequence.states else ():
            self._set_state(sequence.state, mix(self.states[sequence.state], self.updates[left]))
        sequence.states = []

    def _slice(self, piece: Slice, rows: list[int]) -> list[int]:
        sequence = self.sequences.get(piece.sequence)
        if sequence is None:
            raise Violation(f"a slice of sequence {piece.sequence}, which is not open")
        if sequence.n_tokens is None:
            sequence.n_tokens = piece.start
        if not sequence.n_tokens - sequence.n_drafts <= piece.start <= sequence.n_tokens or not piece.tokens:
            raise Violation(
                f"sequence {piece.sequence}: slice at {piece.start}, {sequence.n_tokens} tokens are computed"
            )
        if piece.n_drafts and not piece.sample:
            raise Violation(f"sequence {piece.sequence}: {piece.n_drafts} drafts that cannot be verified")
        self._settle(sequence, sequence.state)
        after = self._states_after(sequence, piece)
        state = self.states[sequence.state] if after else 0
        out: list[int] = []
        total = 0
        for position, row in enumerate(rows, start=piece.start):
            value = mix(row, position, self.stage)
            parts = [row]
            if KvGroup.FULL in self.model.kv_groups:
                self._page(sequence, KvGroup.FULL, position)
                page = self._use_page(KvGroup.FULL, sequence.tables[KvGroup.FULL][position // PAGE_TOKENS])
                page[position % PAGE_TOKENS] = (position, value)
                total = total + value if out else self._sum(sequence, KvGroup.FULL, 0, position)
                parts.append(total)
            if self.model.window is not None:
                self._page(sequence, KvGroup.WINDOW, position)[position % PAGE_TOKENS] = (position, value)
                parts.append(self._sum(sequence, KvGroup.WINDOW, max(0, position - self.model.window + 1), position))
            if KvGroup.RECURRENT in self.model.kv_groups:
                state = mix(state, row)
                parts.append(state)
                if len(after) > 1:
                    self.updates[after[len(out)]] = row
                else:
                    self._set_state(sequence.state, state)
            out.append(mix(*parts))
        sequence.n_tokens, sequence.n_drafts = piece.start + len(rows), piece.n_drafts
        return out

    def _states_after(self, sequence: _Open, piece: Slice) -> list[int]:
        """The state that a slice writes, or those that may be made of what it leaves, one after each token."""
        if KvGroup.RECURRENT not in self.model.kv_groups:
            return []
        states = piece.states or [sequence.state]
        if states[0] != sequence.state or len(set(states)) != len(states) or len(states) != 1 + piece.n_drafts:
            raise Violation(
                f"sequence {piece.sequence} has state {sequence.state}; its slice with {piece.n_drafts} drafts writes "
                f"{states}"
            )
        if len(states) > 1:
            if len(states) != len(piece.tokens) or not all(map(self.pools.is_draft_state, states[1:])):
                raise Violation(f"states {states} after the {len(piece.tokens)} tokens of sequence {piece.sequence}")
            sequence.states = states
        return states

    def _set_state(self, state: int, value: int) -> None:
        """Write a state: pages that share its memory hold nothing then."""
        self.states[state] = value
        if state < self.pools.device_states:
            for page in range(state * self.pools.state_pages, (state + 1) * self.pools.state_pages):
                self.pages[KvGroup.FULL][page] = [_EMPTY] * PAGE_TOKENS

    def _use_page(self, kv_group: KvGroup, page: int) -> list[tuple[int, int]]:
        """Return a page to write to: a state that shares its memory holds nothing then."""
        n = self.pools.state_pages
        if n and kv_group is KvGroup.FULL and 0 <= page < n * self.pools.device_states:
            self.states[page // n] = _POISON
        return self.pages[kv_group][page]

    def _page(self, sequence: _Open, kv_group: KvGroup, position: int) -> list[tuple[int, int]]:
        table = sequence.tables.get(kv_group, [])
        entry = position // PAGE_TOKENS
        if entry >= len(table) or table[entry] < 0:
            raise Violation(f"position {position} has no page in KV group {kv_group}")
        return self.pages[kv_group][table[entry]]

    def _sum(self, sequence: _Open, kv_group: KvGroup, first: int, last: int) -> int:
        total = 0
        for start in range(first - first % PAGE_TOKENS, last + 1, PAGE_TOKENS):
            if sequence.is_out(kv_group, start):
                if not self.model.attends_host:
                    continue
                page = self.host_pages[sequence.hosts[start // PAGE_TOKENS]]
            else:
                page = self._page(sequence, kv_group, start)
            low = max(first, start)
            for position, (written_for, value) in enumerate(page[low - start : last + 1 - start], low):
                if written_for != position:
                    raise Violation(
                        f"position {position} of KV group {kv_group} reads what was written for {written_for}"
                    )
                total += value
        return total

    def _payload(
        self, step: Step, rows_in: list[int], rows_out: list[int]
    ) -> tuple[list[np.ndarray], list[tuple[str, list[int]]]]:
        """Hidden ``[1 (+1 at the head), T, 2]``, logits ``[T, 3]``: numbers made of the row, so a swap shows."""
        arrays: list[tuple[str, np.ndarray]] = []
        if step.want_hidden:
            layers = ([rows_in] if self.stage == 0 else []) + [rows_out]
            arrays.append(("hidden", np.array([[toy_row(r, 2) for r in layer] for layer in layers], dtype=np.float32)))
        if any(piece.pooled for piece in step.slices) and self.stage == self.model.n_stages - 1:
            ends = accumulate(len(piece.tokens) for piece in step.slices)
            texts = [end for end, piece in zip(ends, step.slices, strict=True) if piece.pooled]
            arrays.append(("pooled", np.array([toy_row(rows_out[end - 1], 2) for end in texts], dtype=np.float32)))
        if step.want_logits and self.stage == self.model.n_stages - 1:
            arrays.append(("logits", np.array([toy_row(r, 3) for r in rows_out], dtype=np.float32)))
        return [a for _, a in arrays], [(name, list(a.shape)) for name, a in arrays]


def toy_row(row: int, width: int) -> list[float]:
    """Small numbers that a row stands for in a payload."""
    return [float(mix(row, i) % 1000) for i in range(width)]


class ToyDraftStage(Protocol):
    """A drafter in a toy daemon; see toy_drafter.py."""

    made: dict[int, list[int]]

    def run_drafts(self, message: DraftStep, sampled: list[Sampled] | None) -> StepResult: ...

    def take_operations(self, operations: Sequence[Operation]) -> None: ...

    def with_drafts(self, step: Step) -> Step: ...


class ToyDaemon:
    """Runs one or several stages, one step at a time in the order received.  It is a StageLink as well."""

    def __init__(self, stages: dict[int, ToyStage], limits: ToyLimits):
        self.stages, self.limits = stages, limits
        self.drafter: ToyDraftStage | None = None
        self.inbox: deque[tuple[int, Step | DraftStep | CancelPending]] = deque()
        self.masks: dict[int, np.ndarray] = {}  # by step: [rows, V]
        self.dead = False
        self._connection = Connection(Role.DAEMON)
        self._connection.state = LinkState.READY

    @property
    def ready(self) -> bool:
        """Whether there is something that it can do: a posted step waits for its rows, unless it is recalled."""
        if not self.inbox or self._recalls:
            return bool(self.inbox)
        flags, message = self.inbox[0]
        return not flags & POSTED or (isinstance(message, Step) and self.stages[flags & ~POSTED].has_rows(message))

    @property
    def _recalls(self) -> bool:
        return any(isinstance(message, CancelPending) for _, message in self.inbox)

    def send(self, message: bytes | Masks | CancelPending, /, *, payload: Sequence[bytearray] = ()) -> None:
        if self.dead:
            raise BrokenPipeError("the daemon is dead")
        if isinstance(message, CancelPending):
            self.inbox.append((0, message))
            return
        if isinstance(message, Masks):
            message = encode(message, payload_bytes=sum(map(len, payload)))
        self._connection.receive(b"".join([message, *payload]))
        for frame in self._connection.events():
            if isinstance(frame.message, Masks):
                rows = np.frombuffer(frame.payload, dtype=np.uint8).reshape(frame.message.n_rows, -1)
                bits = np.unpackbits(rows, axis=1, bitorder="little")[:, :VOCABULARY]
                self.masks[frame.message.step_id] = bits
                continue
            step = frame.message.step if isinstance(frame.message, DraftStep) else frame.message
            assert isinstance(step, Step)
            if frame.request_id != step.step_id:
                raise Violation("the request id of a step's frame is not its step id")
            assert isinstance(frame.message, Step | DraftStep)
            self.inbox.append((frame.flags, frame.message))

    def run_one(self) -> tuple[StepResult | PendingCancelled, memoryview]:
        """Execute the oldest step received, or give posted ones back."""
        if self._recalls and (self.inbox[0][0] & POSTED or isinstance(self.inbox[0][1], CancelPending)):
            return self._give_back(), _NO_PAYLOAD
        flags, message = self.inbox.popleft()
        stage = flags & ~POSTED
        assert not isinstance(message, CancelPending)
        step = message.step if isinstance(message, DraftStep) else message
        if step.n_tokens > self.limits.max_step_tokens:
            raise Violation(
                f"step {step.step_id} has {step.n_tokens} tokens, {self.limits.max_step_tokens} were announced"
            )
        stop = max((piece.start + len(piece.tokens) + piece.num_draft_tokens for piece in step.slices), default=0)
        if self.limits.max_context and stop > self.limits.max_context:
            raise Violation(f"step {step.step_id} reaches position {stop}, {self.limits.max_context} were announced")
        if not 0 <= step.region < (self.limits.n_regions or 2 * self.limits.n_stages):
            raise Violation(f"there is no region {step.region}")
        if isinstance(message, DraftStep):
            if stage != self.limits.n_stages or self.drafter is None:
                raise Violation(f"step {step.step_id} is drafted at stage {stage}")
            output = self.stages.get(stage - 1)
            if output is not None and message.tokens is None and step.slices:
                message = replace(message, step=replace(step, slices=output.known.get(step.step_id, step.slices)))
            drafted = self.drafter.run_drafts(message, output.sampled.get(step.step_id) if output else None)
            if output is not None:
                made = {one.sequence: one.tokens for one in drafted.drafts}
                asked = [piece.sequence for piece in step.slices if piece.num_draft_tokens]
                output.tell_drafts(step.step_id, {sequence: made.get(sequence, ()) for sequence in asked})
            return drafted, _NO_PAYLOAD
        if self.drafter is not None and stage == self.limits.n_stages - 1:
            step = self.drafter.with_drafts(step)
        masks = self.masks.pop(step.step_id, None) if stage == self.limits.n_stages - 1 else None
        result, arrays = self.stages[stage].run(step, self.limits.max_sequences, masks)
        if step.upkeep and stage == self.limits.n_stages - 1 and self.drafter is not None:
            output = self.stages[stage]
            known = replace(step, slices=output.known[step.step_id])
            self.drafter.run_drafts(DraftStep(known), output.sampled[step.step_id])
        payload = memoryview(bytearray(b"".join(a.tobytes() for a in arrays)))
        payload_segments(result, payload)  # must fit together
        return result, payload

    def _give_back(self) -> PendingCancelled:
        """Drop a posted step and those behind it, before a recall; of the first the operations may be applied."""
        dropped: list[Step] = []
        kept: list[tuple[int, Step | DraftStep | CancelPending]] = []
        while True:
            flags, message = self.inbox.popleft()
            if isinstance(message, CancelPending):
                break
            if isinstance(message, Step):
                dropped.append(message)
            elif message.step.step_id not in [step.step_id for step in dropped]:  # else it comes again with its step
                kept.append((flags, message))
        self.inbox.extendleft(reversed(kept))
        operations_applied = bool(dropped) and dropped[0].step_id % 2 == 0
        if operations_applied:
            self.stages[message.stage].operate(dropped[0], self.limits.max_sequences)
            if dropped[0].upkeep and message.stage == self.limits.n_stages - 1 and self.drafter is not None:
                self.drafter.take_operations(dropped[0].operations)
        return PendingCancelled(message.stage, [step.step_id for step in dropped], operations_applied)


class ToyRows:
    """The journal's memory over the regions of toy daemons."""

    def __init__(self) -> None:
        self.regions: Regions = {}
        self._blocks: dict[int, list[int]] = {}
        self.gathered: list[int] = []

    def _block(self, block: int) -> list[int]:
        return self._blocks.setdefault(block, [0] * PAGE_TOKENS)

    def has_rows(self, boundary: int, step: Step) -> bool:
        return self.regions.get((boundary, step.region), (PLACED, []))[0] == step.step_id

    def file(self, boundary: int, region: int, copies: Sequence[RowCopy]) -> None:
        for one in copies:
            rows = self.regions[boundary, region][1][one.row : one.row + one.n]
            assert rows
            missing = [0] * (one.n - len(rows))  # of drafts that were not made after all: what the region had before
            self._block(one.block)[one.offset : one.offset + one.n] = [*rows, *missing]

    def place(self, boundary: int, step: Step, copies: Sequence[RowCopy]) -> None:
        rows = [0] * max(one.row + one.n for one in copies)
        for one in copies:
            rows[one.row : one.row + one.n] = self._block(one.block)[one.offset : one.offset + one.n]
        self.regions[boundary, step.region] = (PLACED, rows)

    def copy(self, source: int, target: int, n_rows: int) -> None:
        self._block(target)[:n_rows] = self._block(source)[:n_rows]

    def gather(self, steps: Sequence[Sequence[RowCopy]]) -> FileIO:
        """``gathered``: the rows, for whatever reads them from the file."""
        blocks = [(self._block(one.block), one.offset, one.n) for copies in steps for one in copies]
        self.gathered = [row for block, offset, n in blocks for row in block[offset : offset + n]]
        return FileIO(os.devnull)


@dataclass(frozen=True)
class ToyLimits:
    """What daemons were told in Load."""

    n_stages: int
    max_sequences: int
    max_step_tokens: int
    n_regions: int = 0  # 0: two for each stage
    max_context: int = 0  # 0: any


def toy_daemons(
    model: ToyModel,
    pools: PoolSizes,
    limits: ToyLimits,
    homes: Sequence[int],
    regions: Regions,
) -> tuple[list[ToyDaemon], list[ToyDaemon]]:
    """Return fresh daemons over shared memory, and for each stage the one that runs it; ``homes[s]`` names that of
    stage s.
    """
    stages = {s: ToyStage(model, s, pools, regions) for s in range(model.n_stages)}
    daemons = {home: ToyDaemon({s: stages[s] for s in stages if homes[s] == home}, limits) for home in homes}
    return list(daemons.values()), [daemons[home] for home in homes]
