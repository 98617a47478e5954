"""The scheduler's part of speculative decoding: drafts to ask for, drafts to verify, and the attached drafter.

A drafter is asked with the slice after whose token it drafts; the sequence waits for the drafts
(``LiveSequence.waiting_for_step``), and its next slice verifies them, as ``PENDING`` where the output stage's daemon
makes them (ADR 16). Drafts take only pages and states that are free or that prefix slots can give. Invariants: a
sequence waits only for a step that the attached drafter has yet to answer; drafts never go beyond a request's last
token, nor beyond the pages of its sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from lucevisor.engine.constraint import within_masks
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import RequestState
from lucevisor.engine.running_requests import RunningRequests
from lucevisor.engine.sequence import LiveSequence, RequestRecord
from lucevisor.engine.spec_decode.controller import DrafterSuspension, RequestDrafts, SpecDecodeController
from lucevisor.engine.spec_decode.ngram import INDEX_TOKENS, NgramLookup
from lucevisor.engine.spec_decode.statistics import DraftStatistics
from lucevisor.engine.step import (
    ScheduledSequence,
    ScheduledSlice,
    ScheduledStep,
    WrongResult,
    all_decodes,
    is_decode,
    padded,
    unconsumed_tokens,
)
from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.prefix_tree import NO_STATE
from lucevisor.model.values import KvGroup
from lucevisor.protocol.steps import PENDING, CloseSequence, Drafted, Operation, Sampled, Slice, StepResult


def placeholder_drafts(outstanding: Iterable[ScheduledStep], live: LiveSequence) -> Drafted:
    """Return the drafts that are being made for a sequence; ``outstanding``: steps that the draft stage has yet to
    answer."""
    asked = next((step for step in outstanding if step.step_id == live.waiting_for_step), None)
    n = asked.parts[live.sequence].slice.num_draft_tokens if asked is not None else 0
    return Drafted(live.sequence, [PENDING] * n)


def with_same_draft_step(decodes: Sequence[ScheduledSlice]) -> list[ScheduledSlice]:
    """Return those decodes whose drafts, if being made, the same step asked for: the first of several stages waits for
    one's."""
    asked = next((slice_.live.waiting_for_step for slice_ in decodes if slice_.live.waiting_for_step), 0)
    return [slice_ for slice_ in decodes if slice_.live.waiting_for_step in (0, asked)]


def fill_in(outstanding: Iterable[ScheduledStep], asked: ScheduledStep, drafts: Mapping[int, Drafted]) -> bool:
    """Put the ``drafts`` that a step asked for into the slices after it that verify them; return whether any do."""
    any_filled = False
    for step in outstanding:
        for sequence, part in step.parts.items():
            before = asked.parts.get(sequence) if part.slice.drafts_pend else None
            if before is None or before.live is not part.live or not before.slice.num_draft_tokens:
                continue
            drafted = drafts.get(sequence, Drafted(sequence, []))
            slice_, n = part.slice.with_drafts(drafted.tokens), min(part.num_real_drafts, len(drafted.tokens))
            step.parts[sequence] = replace(part, slice=slice_, num_real_drafts=n)
            any_filled = True
    return any_filled


class Drafting:
    """Drafts of the running sequences."""

    def __init__(self, limits: EngineLimits, pools: PagePools, running: RunningRequests, n_stages: int = 1) -> None:
        self._settings = s = limits.speculation
        self._max_context = limits.max_context
        self._pools = pools
        self._running = running
        self.speculation = SpecDecodeController(s.max_drafts, s.kind, fixed=s.fixed, max_lookup=s.max_lookup)
        self.statistics = DraftStatistics()
        self.suspension = DrafterSuspension()
        self.attached = False
        self.must_open_sequences = False  # the next step opens the running sequences at the drafter
        self._opens_restored = False  # which has their states
        self._was_suspended = False  # the last drafter did when it was detached
        self.outstanding: deque[ScheduledStep] = deque()  # steps that the drafter has yet to answer
        self._n_awaiting_drafts = 0  # of them, those that the output stage has answered, at the front
        self._overlaps = False  # the drafter works beside the output stage
        self.n_stages = n_stages
        self.has_token_ring = n_stages == 1  # the last one publishes to the first what it makes
        self._n_decoding = 0  # when the next step was begun
        self._last_results: dict[frozenset[int], tuple[ScheduledStep, float]] = {}  # by the sequences of a micro-batch
        self._cold_drafts = 0  # the last step after which drafts were compiled or captured
        self._agreed_width = 0  # drafts of a slice that the next step verifies, as decided before

    # ---- the drafter

    def attach(self, *, with_output: bool, must_open_sequences: bool, restored: bool = False) -> None:
        """Ask a drafter from the next step on, in the output stage's daemon (``with_output``) or beside it.
        ``must_open_sequences``: those open in the shards. ``restored``: it has the state of the last one."""
        restored = restored and not self._was_suspended
        self.attached, self.must_open_sequences, self._overlaps = True, must_open_sequences, not with_output
        self._opens_restored, self._was_suspended = restored, False
        self._pools.resume_draft_epoch() if restored else self._pools.begin_draft_epoch()

    def detach(self) -> None:
        """Stop drafting; sequences that wait for drafts go on without."""
        if self.attached:
            self._was_suspended = self.suspended
            self.suspension.reset()
            self.attached = self.must_open_sequences = False
            self.outstanding.clear()
            self._last_results.clear()
            self._n_awaiting_drafts = 0
            self._pools.end_draft_epoch()
            for record in self._running:
                if record.live is not None:
                    record.live.waiting_for_step = 0

    def open_running(self) -> list[Operation]:
        """Return the operations that open all running sequences at a drafter without any."""
        self.must_open_sequences = False
        return self._running.opening_operations(restored=self._opens_restored)

    @property
    def suspended(self) -> bool:
        """True if the drafter gets no steps, and has no sequences."""
        return self.suspension.suspended

    @property
    def active(self) -> bool:
        """True if steps go to a drafter."""
        return self.attached and not self.suspended

    def toggle_due(self) -> bool:
        """Return whether to suspend or resume the drafter before the next step."""
        if not self.suspension.is_due(idle=not self._running) or not self.attached or self.must_open_sequences:
            return False  # at nearly every step
        asked = any(step.num_draft_tokens for step in self.outstanding)
        return not asked and (self.suspended or bool(self.speculation.no_drafts))

    def suspend(self, waiting: Sequence[Operation]) -> list[Operation]:
        """Send the drafter nothing more; return the ``waiting`` operations and those that leave it
        without sequences."""
        self.suspension.toggle()
        self._pools.end_draft_epoch()
        lives = [record.live for record in self._running if record.live is not None]
        return [*waiting, *(CloseSequence(live.sequence) for live in lives)]

    def resume(self, *, must_open_sequences: bool) -> None:
        """Ask the drafter again, as one that was just attached."""
        self.suspension.toggle()
        self.must_open_sequences, self._opens_restored = must_open_sequences, False
        self._pools.begin_draft_epoch()

    @property
    def verifies_placeholders(self) -> bool:
        """True if the next step may verify drafts before they are known here: the output stage's daemon makes them, and
        no masks depend on them. Of several stages the first would keep a prompt waiting."""
        if not self.attached or self._overlaps or not self.has_token_ring:
            return False
        alone = self.n_stages == 1
        return all(
            record.request.constraint is None and (alone or record.state is RequestState.DECODE)
            for record in self._running
        )

    @property
    def n_drafting(self) -> int:
        """Micro-batches of decodes whose drafts are being made, and waited for."""
        if self.verifies_placeholders:
            return 0
        return sum(
            bool(step.decodes and step.num_draft_tokens) for step in list(self.outstanding)[: self._n_awaiting_drafts]
        )

    def n_groups(self, n_stages: int) -> int:
        """Return into how many groups decoding sequences are dealt; a group is verified, then drafted."""
        self.speculation.apart = self.active and self._overlaps
        return self.speculation.choose_groups(n_stages)

    # ---- plans

    def with_drafts(self, decodes: Sequence[ScheduledSlice]) -> list[ScheduledSlice]:
        """Add drafts to decodes that share a step, before their pages are secured."""
        agreed, self._agreed_width = self._agreed_width, 0
        records = self._offered(decodes)
        if not any(drafted.tokens for _, drafted in records):
            return [*decodes]
        wanted = agreed or self.speculation.num_verify_tokens(records, self._n_decoding)
        widths, most = [], max(self._settings.max_drafts, *(len(drafted.tokens) for _, drafted in records))
        for slice_ in decodes:
            n_left = slice_.record.max_tokens - slice_.record.n_generated - 1
            widths.append(max(0, min(wanted, most, n_left)))
        widths = within_masks(self._within_states(widths), [slice_.record.request.constraint for slice_ in decodes])
        if len(widths) > 2 and min(widths):  # a GPU's graphs are of equal slices
            widths = [min(widths)] * len(widths)
        return [
            padded(slice_, width, drafted) for slice_, width, (_, drafted) in zip(decodes, widths, records, strict=True)
        ]

    def would_draft(self, ahead: Sequence[ScheduledSlice]) -> bool:
        """Return whether decodes should wait for the tokens they start from, because drafts are likely to follow."""
        records = self._offered(ahead)
        offered = any(drafted.tokens for _, drafted in records)
        self._agreed_width = self.speculation.num_verify_tokens(records, self._n_decoding) if offered else 0
        return self._agreed_width > 0

    def fit(self, slice_: ScheduledSlice) -> tuple[ScheduledSlice, list[Operation]]:
        """Return a slice with pages and states for its drafts and for those to ask for, as many as there is room for.
        Call it in the order of the step's slices, and plan all of them."""
        live, table = slice_.live, slice_.live.table
        n_drafts, room = len(slice_.drafts), table.draft_room(slice_.stop)
        n_drafts = n_drafts if room is None else min(n_drafts, room)
        covered = table.covers(slice_.stop + n_drafts + self._settings.max_drafts + 1)
        operations = self._running.extend(live, slice_.stop + n_drafts) if n_drafts and not covered else []
        while n_drafts and not covered and table.missing(slice_.stop + n_drafts):
            n_drafts -= 1
        states: list[int] = []
        if n_drafts and live.state != NO_STATE:
            taken = self._pools.draft_states.allocate(n_drafts) or []
            n_drafts = len(taken)
            states = [live.state, *taken] if taken else []
        stop, num_draft_tokens = slice_.stop + n_drafts, self._num_draft_tokens(slice_, n_drafts)
        if not slice_.drafts and not num_draft_tokens:
            return slice_, operations
        if num_draft_tokens and not covered:
            operations += self._running.extend(live, stop, num_draft_tokens + 1)
            while num_draft_tokens and table.missing(stop, num_draft_tokens + 1):
                num_draft_tokens -= 1
        slice_ = replace(slice_, drafts=slice_.drafts[:n_drafts], num_real_drafts=min(slice_.num_real_drafts, n_drafts))
        return replace(slice_, states=states, num_draft_tokens=num_draft_tokens), operations

    def draft_from(self, live: LiveSequence) -> int:
        """Return the first position of a sequence whose state the drafter has; 0 without an active one."""
        if not self.active:
            return 0
        epoch, position = live.draft_from
        if epoch != (now := self._pools[KvGroup.FULL].epoch):
            position = live.table.draft_from()
            live.draft_from = now, position
        return position

    def is_upkeep(self, slices: Sequence[Slice], n_stages: int) -> bool:
        """Return whether the drafter takes decodes along without a message and an answer of its own: it is asked for
        nothing, in the output stage's daemon."""
        if not self.active or self._overlaps or n_stages == 1:
            return False
        return all_decodes(slices) and not any(slice_.num_draft_tokens or slice_.drafts_pend for slice_ in slices)

    def on_step_planned(self, step: ScheduledStep, *, upkeep: bool = False) -> None:
        """Record a step that is sent to the drafter, too, if there is one; with ``upkeep`` it does not answer."""
        if self.active and not upkeep:
            self.outstanding.append(step)
        if self._settings.lookup:
            records = [part.record for part in step.parts.values() if part.record.max_tokens > 1]  # others: no drafts
            # Prompts, while the shards compute them.
            self._index(record for record in records if record.state is RequestState.PREFILL and not record.uncached)

    # ---- results

    def on_step_applied(
        self, scheduled: ScheduledStep, now: float, stages_s: float, upkeep_s: float, *, cold: bool
    ) -> None:
        """Let the sequences of a step wait for their drafts. ``stages_s``: seconds of all stages, ``upkeep_s``: of the
        drafter for decodes since the result before; ``cold`` as in StepResult."""
        self.statistics.upkeep_s += upkeep_s
        if scheduled.has_drafts:
            rows = [(len(part.slice.tokens), part.slice.n_drafts > 0) for part in scheduled.parts.values()]
            self.statistics.verify_s += stages_s * _share(rows)
        if self._settings.max_drafts:
            self._record_round(scheduled, now, cold=cold)
        if all(step.step_id != scheduled.step_id for step in self.outstanding):
            return  # planned before the drafter was attached, or it does not answer
        self._n_awaiting_drafts += 1
        for part in scheduled.parts.values():
            if part.slice.num_draft_tokens:
                part.live.waiting_for_step = scheduled.step_id

    def _record_round(self, step: ScheduledStep, now: float, *, cold: bool) -> None:
        """Tell the controller how long a round took: since the same micro-batch's last result, if only decodes ran in
        between."""
        if not step.only_decodes:
            self._last_results.clear()
            return
        self.suspension.record_step()
        self.speculation.record_step()
        batch = frozenset(step.parts)
        last = self._last_results.pop(batch, None)
        self._last_results = {other: r for other, r in self._last_results.items() if other.isdisjoint(batch)}
        self._last_results[batch] = step, now
        widths = {part.slice.n_drafts for part in step.parts.values()}
        if last is None or len(widths) > 1:
            return
        before, then = last
        width, asked = widths.pop(), {part.slice.num_draft_tokens for part in before.parts.values()}
        looked_up = any(part.record.drafts.looked_up for part in step.parts.values())
        # Of plain rounds only those after a plain step: the first one after drafts does not run ahead.
        if asked == {0} and (before.plain or width):
            self.speculation.record_round(width, now - then, asked=False, cold=cold)
        elif asked == {width} and not looked_up:
            cold = cold or self._cold_drafts == before.step_id
            self.speculation.record_round(width, now - then, asked=True, cold=cold)

    def on_drafts(self, result: StepResult) -> bool:
        """Store the drafts of a step; return whether another step may be possible now. Raises WrongResult, changing
        nothing, if they do not answer the oldest step that the drafter has yet to answer."""
        expected = self.outstanding[0] if self._n_awaiting_drafts else None
        if expected is None or expected.step_id != result.step_id:
            due = "none" if expected is None else f"step {expected.step_id}"
            raise WrongResult(f"the draft stage answered step {result.step_id} while {due} was due")
        self.outstanding.popleft()
        self._n_awaiting_drafts -= 1
        by_sequence = {drafted.sequence: drafted for drafted in result.drafts}
        for sequence, part in expected.parts.items():
            if part.record.live is not part.live:
                continue
            drafted = by_sequence.get(sequence)
            if part.live.waiting_for_step == expected.step_id:
                part.live.waiting_for_step, part.live.drafted = 0, drafted
        self._cold_drafts = result.step_id if result.cold else self._cold_drafts
        widths = [(len(part.slice.tokens), part.slice.num_draft_tokens) for part in expected.parts.values()]
        n_drafted = sum(len(by_sequence[sequence].tokens) for sequence in expected.parts if sequence in by_sequence)
        self.statistics.drafted(n_drafted, _share([(n + width, width > 0) for n, width in widths]), result.compute_s)
        verified = fill_in(self.outstanding, expected, by_sequence)
        return not verified or len(self._running) > 1

    def on_tokens(self, part: ScheduledSequence, drawn: Sequence[Sampled]) -> None:
        """Record the tokens drawn for a slice before they are appended; all but the last are accepted drafts."""
        record, n_accepted = part.record, len(drawn) - 1
        if part.num_real_drafts:
            self.speculation.record_verdict(record.drafts, part.num_real_drafts, min(n_accepted, part.num_real_drafts))
        if record.ended or record.first_token_at is None or not is_decode(part.slice):
            return
        if not n_accepted and not part.num_real_drafts:
            self.statistics.n_plain += 1
            return
        ends = [i for i, sampled in enumerate(drawn) if sampled.token in record.request.stop_ids]
        if ends:  # the request ends there
            n_accepted = min(n_accepted, ends[0] + 1)
        looked_up, reported = record.drafts.looked_up, not part.slice.drafts_pend
        self.statistics.decoded(part.num_real_drafts, n_accepted, looked_up=looked_up, reported=reported)
        record.drafts.n_verified += max(part.num_real_drafts, n_accepted)
        record.drafts.n_accepted += n_accepted

    # ---- inside

    def _offered(self, decodes: Sequence[ScheduledSlice]) -> list[tuple[RequestDrafts, Drafted]]:
        """Return the drafts there are for decodes; none where drafts are off."""
        if not self._settings.max_drafts:
            return []
        n_prompts = sum(record.state is RequestState.PREFILL for record in self._running)
        self._n_decoding = len(self._running) - n_prompts
        if self._settings.lookup:
            self._index(slice_.record for slice_ in decodes)
        return [(slice_.record.drafts, self._candidates(slice_)) for slice_ in decodes]

    def _within_states(self, widths: list[int]) -> list[int]:
        """Cut the longest slices until there is an id for the recurrent state after every draft."""
        if KvGroup.RECURRENT not in self._pools:
            return widths
        n_free, most = self._pools.draft_states.n_free, max(widths)
        while sum(min(width, most) for width in widths) > n_free:
            most -= 1
        return [min(width, most) for width in widths]

    def _num_draft_tokens(self, slice_: ScheduledSlice, n_drafts: int) -> int:
        """Return how many drafts to ask for after the token that a slice samples."""
        record = slice_.record
        if not self.active or not slice_.samples or record.uncached or self.draft_from(slice_.live) >= slice_.stop:
            return 0
        most = min(
            self._settings.max_drafts,
            record.max_tokens - record.n_generated - 2 - slice_.runs_ahead,  # the last token needs no draft
            self._max_context - (slice_.stop + n_drafts) - 1,
        )
        n_decoding = self._n_decoding if record.state is RequestState.DECODE else len(self._running)  # prompts end
        wanted = min(most, self.speculation.num_draft_tokens(record.drafts, n_decoding)) if most > 0 else 0
        if wanted and not self.speculation.in_trial:
            self.suspension.record_use()
        return wanted

    def _candidates(self, slice_: ScheduledSlice) -> Drafted:
        """Return the drafts that may follow a sequence's tokens, up to the first that its constraint forbids."""
        live = slice_.live
        drafted = self.speculation.candidates(
            slice_.record.drafts, live.drafted or placeholder_drafts(self.outstanding, live), self._n_decoding
        )
        constraint = slice_.record.request.constraint
        if constraint is None or not drafted.tokens:
            return drafted
        n = constraint.n_valid(*unconsumed_tokens(slice_.record, constraint), drafted.tokens)
        return Drafted(drafted.sequence, drafted.tokens[:n], drafted.probabilities[:n])

    @staticmethod
    def _index(records: Iterable[RequestRecord]) -> None:
        """Index new tokens of requests, at most ``INDEX_TOKENS`` of them."""
        n_left = INDEX_TOKENS
        for record in records:
            if record.drafts.lookup is None:
                record.drafts.lookup = NgramLookup(record.tokens)
            n_left -= record.drafts.lookup.index(n_left)


def _share(rows: Sequence[tuple[int, bool]]) -> float:
    """Return the share of rows that are wanted, of (rows, whether they are)."""
    return sum(n for n, wanted in rows if wanted) / max(1, sum(n for n, _ in rows))
