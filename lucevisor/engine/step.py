"""Scheduled steps: which requests a step carries, and whether a result answers it, which is applied or
refused whole."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from lucevisor.engine.constraint import Constraint, MaskJob
from lucevisor.engine.pipeline import Embeddings
from lucevisor.engine.request import TokenLogprob
from lucevisor.engine.sequence import LiveSequence, RequestRecord
from lucevisor.protocol.frames import payload_segments
from lucevisor.protocol.steps import PENDING, Drafted, Operation, PromptLogprobs, Sampled, Slice, Step, StepResult


class WrongResult(Exception):
    """A step result that does not answer its step: supervisor and daemons no longer agree on the state."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step to send; ``request_ids[i]`` owns ``step.slices[i]``. ``draft_operations``: those that the draft stage,
    just attached or about to be suspended, gets in place of the step's own. ``embeddings``: rows of images in its
    slices."""

    step: Step
    request_ids: tuple[str, ...]
    mask_jobs: Sequence[MaskJob] = ()
    draft_operations: Sequence[Operation] | None = None
    embeddings: Embeddings = field(default_factory=dict)


class ScheduledSlice(msgspec.Struct, eq=False):  # quicker to make than a dataclass: a step has one for each sequence
    """A slice chosen for the next step: from ``live.n_scheduled`` to ``stop``, then ``drafts``, of which
    ``num_real_drafts`` are no padding. ``states`` and ``num_draft_tokens`` as in Slice."""

    record: RequestRecord
    live: LiveSequence
    stop: int
    drafts: Sequence[int] = ()
    num_real_drafts: int = 0
    states: Sequence[int] = ()
    num_draft_tokens: int = 0

    @property
    def samples(self) -> bool:
        """True if a token is sampled after it."""
        return self.stop >= self.record.n_tokens and not self.record.request.pooled

    @property
    def runs_ahead(self) -> bool:
        """True if it starts from a token that a step in flight samples."""
        return self.stop > self.record.n_tokens

    @property
    def drafts_pend(self) -> bool:
        """True if it verifies drafts that are being made."""
        return bool(self.drafts) and self.drafts[-1] == PENDING

    @property
    def n_tokens(self) -> int:
        """Rows of the slice, drafts included."""
        return self.stop - self.live.n_scheduled + len(self.drafts)

    @property
    def _ranks_pages(self) -> bool:
        """True if its last queries rank the pages: those before the last token of a prompt, and some decodes."""
        table, start = self.live.table, self.live.n_scheduled
        if self.samples:
            return self.stop - start == 1 and not self.drafts and table.ranks_at(start)
        return table.ranks_next and self.stop == len(self.record.tokens) - 1

    def schedule(self, step_id: int, draft_from: int) -> Slice:
        """Return the slice for the step ``step_id``, and count its tokens as scheduled."""
        live, record, stop, n_drafts = self.live, self.record, self.stop, len(self.drafts)
        request, start, samples = record.request, live.n_scheduled, self.samples
        live.ranking = step_id if live.table.ranks_next and self._ranks_pages else 0
        live.drafted, live.waiting_for_step = None, 0
        live.draft_states = [*self.states[1:]]
        live.n_computed, live.n_scheduled = stop, stop + n_drafts
        live.last_step = step_id
        record.n_in_flight += 1
        return Slice(  # by position, which is quicker
            live.sequence,
            start,
            [PENDING] if stop > record.n_tokens else [*record.tokens[start:stop], *self.drafts],
            samples,
            n_drafts,
            [*self.states],
            self.num_draft_tokens,
            draft_from,
            samples and request.constraint is not None,
            record.logprob_targets(start, stop) if request.prompt_logprobs else [],
            request.pooled and stop >= record.n_tokens,
        )


class ScheduledSequence(msgspec.Struct, frozen=True):
    """A request's slice in a step. ``live``: its sequence then; by the time of the result it may have another."""

    record: RequestRecord
    live: LiveSequence
    slice: Slice
    num_real_drafts: int = 0

    @property
    def drafts(self) -> list[int]:
        return self.slice.tokens[len(self.slice.tokens) - self.slice.n_drafts :]


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step between plan and result.  ``parts``: by sequence id at the time of the plan.

    ``plain``: all slices are decodes without drafts that ask for neither drafts nor log-probabilities of prompts,
    as in most steps.  They may have masks.
    """

    step_id: int
    parts: dict[int, ScheduledSequence]
    decodes: bool
    depends_on_step: int = 0  # the step that samples the tokens it starts from; 0: they are known
    plain: bool = False

    @property
    def live_sequences(self) -> dict[int, LiveSequence]:
        return {sequence: part.live for sequence, part in self.parts.items()}

    def take_prompt_logprobs(self, found: Sequence[PromptLogprobs]) -> None:
        """Give requests their log-probabilities of prompts.  Raises WrongResult, changing nothing, if others came."""
        if not found and (self.plain or not any(part.slice.logprob_targets for part in self.parts.values())):
            return
        asked = {(s, part.slice.start + 1, len(part.slice.logprob_targets)) for s, part in self.parts.items()}
        if {(one.sequence, one.start, len(one.logprobs)) for one in found} != {one for one in asked if one[2]}:
            raise WrongResult(f"step {self.step_id} asked for other log-probabilities than the result has")
        for one in found:
            for at, (logprob, top) in enumerate(zip(one.logprobs, one.tops, strict=True), one.start):
                self.parts[one.sequence].record.prompt_logprobs[at] = TokenLogprob(logprob, tuple(top))

    def pooled(self, result: StepResult, payload: memoryview) -> dict[int, array[float]]:
        """Return the pooled hidden states of texts, by sequence.  Raises WrongResult if others came."""
        asked = [] if self.plain else [sequence for sequence, part in self.parts.items() if part.slice.pooled]
        if not asked:
            return {}
        for name, shape, numbers in payload_segments(result, payload):
            if name == "pooled" and len(shape) == 2 and shape[0] == len(asked):
                width = shape[1]
                rows = (numbers[i * width : (i + 1) * width] for i in range(len(asked)))
                return {sequence: array("f", row.tobytes()) for sequence, row in zip(asked, rows, strict=True)}
        raise WrongResult(f"step {self.step_id} asked for the pooled hidden states of {len(asked)} texts")

    @property
    def only_decodes(self) -> bool:
        """True if it computes no prompt, and something."""
        return bool(self.parts) and (self.plain or all(is_decode(part.slice) for part in self.parts.values()))

    @property
    def has_drafts(self) -> bool:
        return not self.plain and any(part.slice.n_drafts for part in self.parts.values())

    @property
    def num_draft_tokens(self) -> int:
        return 0 if self.plain else max([part.slice.num_draft_tokens for part in self.parts.values()], default=0)


def mask_jobs(parts: Iterable[ScheduledSequence]) -> list[MaskJob]:
    """Return the masks to make for the masked slices of a step, in their order."""
    jobs = []
    for part in parts:
        if not part.slice.masked:
            continue
        request, constraint = part.record.request, part.record.request.constraint
        if constraint is not None:
            jobs.append(
                MaskJob(request.request_id, constraint, *unconsumed_tokens(part.record, constraint), part.drafts)
            )
    return jobs


def embeddings_of(slices: Iterable[tuple[RequestRecord, Slice]]) -> Embeddings:
    """Return the embedding rows of images in slices, in order, by sequence."""
    found: dict[int, list[memoryview]] = {}
    for record, slice_ in slices:
        if record.request.images:
            stop = slice_.start + len(slice_.tokens)
            parts = [image.rows_between(slice_.start, stop) for image in record.request.images]
            if any(parts := [part for part in parts if len(part)]):
                found[slice_.sequence] = parts
    return found


def unconsumed_tokens(record: RequestRecord, constraint: Constraint) -> tuple[int, list[int]]:
    """Return the tokens of a request's output that its constraint has not taken, and the place of the first."""
    start = constraint.n_tokens
    return start, record.tokens[len(record.request.prompt) + start :]


def drawn_tokens(scheduled: ScheduledStep | None, result: StepResult) -> dict[int, list[Sampled]]:
    """Return a result's tokens by sequence id. Raises WrongResult when ``scheduled``, the oldest step in flight, asked
    for others."""
    if scheduled is None or scheduled.step_id != result.step_id:
        expected = scheduled.step_id if scheduled is not None else "none"
        raise WrongResult(f"a result of step {result.step_id} came; the oldest step in flight is {expected}")
    drawn: dict[int, list[Sampled]] = {}
    for sampled in result.sampled:
        if sampled.sequence in drawn:
            drawn[sampled.sequence].append(sampled)
        else:
            drawn[sampled.sequence] = [sampled]
    asked: AbstractSet[int] = scheduled.parts.keys()
    if not scheduled.plain:
        asked = {sequence for sequence, part in scheduled.parts.items() if part.slice.sample}
    if asked != drawn.keys():
        raise WrongResult(
            f"step {result.step_id} asked for tokens of sequences {sorted(asked)}, the result has {sorted(drawn)}"
        )
    for sequence, tokens in drawn.items() if len(drawn) < len(result.sampled) else ():
        if len(tokens) == 1:
            continue
        accepted, slice_ = [sampled.token for sampled in tokens[:-1]], scheduled.parts[sequence].slice
        drafts = accepted[: slice_.n_drafts] if slice_.drafts_pend else slice_.drafts  # their drafter was detached
        if accepted != drafts[: len(accepted)]:
            raise WrongResult(f"step {result.step_id} verified {drafts} of sequence {sequence} and accepted {accepted}")
    return drawn


def all_decodes(slices: Sequence[Slice]) -> bool:
    """Return whether a step computes no prompt."""
    return all(is_decode(slice_) for slice_ in slices)


def is_decode(slice_: Slice) -> bool:
    """Return whether a slice has one token that is certain, and samples."""
    return slice_.sample and len(slice_.tokens) - slice_.n_drafts == 1


def is_plain(slice_: Slice) -> bool:
    """Return whether a slice is a decode without drafts that asks for nothing more."""
    return slice_.sample and len(slice_.tokens) == 1 and not slice_.num_draft_tokens and not slice_.logprob_targets


def padded(slice_: ScheduledSlice, width: int, drafted: Drafted) -> ScheduledSlice:
    """Return a decode with ``width`` drafts: what lacks repeats the last one."""
    if not width:
        return slice_
    drafts = drafted.tokens[:width]
    last = drafts[-1] if drafts else slice_.record.tokens[-1]
    return replace(slice_, drafts=drafts + [last] * (width - len(drafts)), num_real_drafts=len(drafts))
