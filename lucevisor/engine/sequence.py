"""The scheduler's record of one request, and of the sequence it runs as exactly in the states PREFILL and DECODE."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

from lucevisor.engine.request import (
    TRANSITIONS,
    FinishedEvent,
    GenerationRequest,
    Reason,
    RequestError,
    RequestState,
    Timings,
    TokenLogprob,
    Usage,
)
from lucevisor.engine.spec_decode.controller import RequestDrafts
from lucevisor.kv.page_table import Growth, MakeRoom, PageSwap, PageTable
from lucevisor.kv.prefix_cache import PrefixMatch
from lucevisor.kv.prefix_tree import NO_STATE, CacheTier, Origin
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.vision import IMAGE_ID
from lucevisor.protocol.steps import Drafted, Operation, PageIn, PageOut, Sampled, SetPages


class InvalidTransition(Exception):
    """A change of state that is not in TRANSITIONS: a defect of the scheduler."""


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows that a step returns besides tokens, for comparing placements.  Such slices have a step of their own.

    ``rows``: at most so many tokens per step, so that the payload fits a frame.
    """

    hidden: bool
    rows: int


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence inside the shards: the ids it owns, and how far its tokens are computed.

    ``tokens[:n_computed]`` count as soon as their step is planned, as stages run steps in order. ``n_scheduled`` also
    counts drafts under verification, after which ``n_computed`` grows by the accepted ones and ``n_scheduled`` falls
    back to it. ``draft_states[i]``: id of the recurrent state after draft i; ``accepted`` after the last accepted one,
    in the place of ``state``."""

    sequence: int
    state: int  # live recurrent state; -1 when the model has none
    table: PageTable
    n_computed: int = 0
    began_at: int = 0  # tokens that were cached when it began: others computed them
    n_scheduled: int = 0  # n_computed, and the drafts under verification
    draft_states: list[int] = field(default_factory=list)
    accepted: int = NO_STATE
    waiting_for_step: int = 0  # the step whose drafts it waits for; 0: none
    drafted: Drafted | None = None  # drafts that follow its tokens; the next slice verifies them
    draft_from: tuple[int, int] = (0, 0)  # draft epoch, and the first position whose state the drafter has
    n_prefill: int = 0  # tokens to compute when it started
    last_step: int = 0  # the last step with a slice of it
    ranking: int = 0  # the step that ranks its pages, which it waits for; 0: none

    def accept(self, draft: int) -> None:
        """Count a draft as computed, and let the sequence go on from the state after it.  Call once each, in order."""
        self.n_computed += 1
        if self.draft_states:
            self.accepted = self.draft_states[draft]


def page_operations(sequence: int, growth: Growth) -> list[Operation]:
    """Return the operations that give the shards the new entries of a table."""
    leaving: list[Operation] = []
    if growth.paged_out:
        leaving.append(PageOut(sequence, [*growth.paged_out], [*growth.hosts]))
    return [*leaving, SetPages(sequence, growth.kv_group, growth.first, growth.pages)] if growth.pages else leaving


def swap_operations(sequence: int, swap: PageSwap | None) -> list[Operation]:
    """Return the operations that move pages to host memory and back."""
    operations: list[Operation] = []
    if swap is not None and swap.out:
        operations.append(PageOut(sequence, swap.out, swap.hosts))
    if swap is not None and swap.back:
        operations.append(PageIn(sequence, swap.back, swap.pages))
    return operations


def grow_table(
    sequence: int,
    table: PageTable,
    start: int,
    stop: int,
    n_more: int = 0,
    make_room: MakeRoom = lambda *_: None,
) -> list[Operation] | None:
    """Give a table the pages of a slice, and swap some if they were ranked; return the operations that do the same in
    the shards. None, as ``PageTable.grow``."""
    growths = table.grow(start, stop, n_more)
    if growths is None:
        return None
    swap = table.swap(make_room)
    if not growths and swap is None:
        return []
    operations = [operation for growth in growths for operation in page_operations(sequence, growth)]
    return operations + swap_operations(sequence, swap)


@dataclass(slots=True, eq=False)
class PrefixUse:
    """Prefix cache use of one request. ``held``: it waits for a prefix that is being restored. ``checkpoints``: where
    its slices end and slots are made, and why; ``branch_position``: one more, where other prompts diverge from it.
    ``lookup``: the version of the index and the match found. ``common``: tokens shared with running requests, by
    arrival. ``cached``: reused tokens of the prompt, from ``tier``; None before it starts. ``fetched``: how many were
    cached when lower tiers were asked for more."""

    held: bool = False
    checkpoints: dict[int, Origin] = field(default_factory=dict)
    checkpoint_positions: list[int] = field(default_factory=list)
    branch_position: int = 0
    lookup: tuple[int, PrefixMatch] | None = None
    common: dict[int, int] = field(default_factory=dict)
    cached: int | None = None
    tier: CacheTier = "device"
    fetched: int | None = None


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request from submit to its end.  ``arrival`` orders by age; ``tokens`` is the prompt, then the output."""

    request: GenerationRequest
    arrival: int
    max_tokens: int  # lowered to what context and pages allow
    submitted_at: float
    wanted: WantedRows | None = None
    tokens: TokenBuffer = field(default_factory=TokenBuffer)
    mu: float | None = None  # where mirostat stands after the last token
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by position
    state: RequestState = RequestState.QUEUED
    live: LiveSequence | None = None
    n_in_flight: int = 0  # steps in flight that carry a slice of it
    prefix: PrefixUse = field(default_factory=PrefixUse)
    n_to_prefill: int = 0  # tokens to prefill, as estimated when it was queued
    n_overtaken_tokens: int = 0  # tokens of later requests that started before it
    has_priority: bool = False  # it starts before all others that wait
    n_computed_before: int = 0  # the most tokens that it had computed when it was preempted
    last_loss: int = 0  # the last loss or restart of shards while it ran
    n_losses: int = 0  # losses in a row without a token in between
    paused_at: float | None = None  # when the pause began in which it is, since its last token
    n_tokens_at_loss: int = 0  # how many tokens it had at the last loss
    drafts: RequestDrafts = field(init=False)
    started_at: float | None = None
    first_token_at: float | None = None

    n_tokens: int = 0  # length of ``tokens``, which every step needs several times
    ended: bool = False  # the request is over
    max_total_tokens: int = 0  # how many it has at its longest
    uncached: bool = False  # it neither uses the prefix cache nor is cached: it generates nothing
    may_run_ahead: bool = False  # its tokens are drawn from their rows and positions alone

    def __post_init__(self) -> None:
        self.tokens = TokenBuffer(self.request.prompt)
        self.drafts = RequestDrafts()
        self.n_tokens = len(self.tokens)
        self.max_total_tokens = self.n_tokens + self.max_tokens
        self.uncached = self.wanted is not None or self.request.pooled
        stateless = self.request.constraint is None and self.request.sampling.stateless
        self.may_run_ahead = stateless and not self.uncached

    @property
    def n_generated(self) -> int:
        """Tokens generated so far, the stop id included."""
        return self.n_tokens - len(self.request.prompt)

    def n_steps_served(self, chunk: int) -> int:
        """Return for how many steps the request was served since it got its sequence, one per chunk of the prompt and
        token of the answer, without recomputed tokens."""
        if self.live is None:
            return 0
        start, n_prompt = max(self.live.began_at, self.n_computed_before), len(self.request.prompt)
        n_prefilled = min(self.live.n_computed, n_prompt) - start
        return max(0, n_prefilled) // chunk + max(0, self.live.n_computed - max(start, n_prompt))

    @property
    def computes_prompt(self) -> bool:
        """True if all rows of its prompt are wanted, so that no cached prefix can stand for them."""
        return self.uncached or (self.request.prompt_logprobs and not self.request.prompt_logprobs_from)

    def logprob_targets(self, start: int, stop: int) -> list[int]:
        """Return the tokens after positions ``[start, stop)`` whose log-probabilities are wanted."""
        if not self.request.prompt_logprobs or stop <= self.request.prompt_logprobs_from:
            return []
        return [
            id_ if id_ < IMAGE_ID else 0 for id_ in self.tokens[start + 1 : min(stop + 1, len(self.request.prompt))]
        ]

    def append(self, sampled: Sampled) -> None:
        self.tokens.append(sampled.token)
        self.n_tokens += 1
        self.mu = sampled.mu

    def move_to(self, arrival: int, max_tokens: int) -> None:
        """Forget what the engine that released it knew of it, as another one adopts it."""
        self.arrival, self.max_tokens = arrival, max_tokens
        self.max_total_tokens = len(self.request.prompt) + max_tokens
        self.prefix = PrefixUse(cached=self.prefix.cached, tier=self.prefix.tier)
        self.has_priority = self.started_at is not None  # it has waited before
        self.n_overtaken_tokens = self.last_loss = 0

    def move(self, state: RequestState) -> None:
        """Change the state.  Raises InvalidTransition if TRANSITIONS does not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise InvalidTransition(
                f"request {self.request.request_id}: {self.state.value} -> {state.value} is not in the table"
            )
        self.state = state
        self.ended = not TRANSITIONS[state]

    def beside_images(self, start: int, stop: int) -> int:
        """Return where a slice that is to end at ``stop`` ends if it has no part of an image."""
        for image in self.request.image_spans:
            if image.start < stop < image.stop:
                return image.stop if image.start <= start else image.start
        return stop

    def next_stop(self, start: int, chunk: int) -> int:
        """Return where a slice that begins at ``start`` ends, drafts not counted: at absolute multiples of the chunk
        size and at checkpoints, so that a prompt computed from the middle has the same slices."""
        if self.wanted is not None:
            chunk = min(chunk, self.wanted.rows)
        stop = min(len(self.tokens), (start // chunk + 1) * chunk)
        checkpoint_positions = self.prefix.checkpoint_positions
        at = bisect_right(checkpoint_positions, start)
        return min(stop, checkpoint_positions[at]) if at < len(checkpoint_positions) else stop

    def finished_event(
        self,
        reason: Reason,
        now: float,
        error: RequestError | None = None,
        stop_id: int | None = None,
        pooled: array[float] | None = None,
    ) -> FinishedEvent:
        """Return the last event, with usage and times up to ``now``."""
        started = now if self.started_at is None else self.started_at
        first = now if self.first_token_at is None else self.first_token_at
        return FinishedEvent(
            reason=reason,
            usage=Usage(
                len(self.request.prompt),
                self.prefix.cached or 0,
                self.n_generated,
                self.drafts.n_verified,
                self.drafts.n_accepted,
            ),
            timings=Timings(started - self.submitted_at, first - started, now - first),
            error=error,
            stop_id=stop_id,
            prompt_logprobs=tuple(self.prompt_logprobs[at] for at in sorted(self.prompt_logprobs)),
            pooled=pooled,
        )
