"""Records of a step: state operations, slices of tokens, sampling parameters, results.  No sockets, no tensors.

This is the hot path: Step and StepResult, with everything in them, are encoded as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from lucevisor.model.values import KvGroup

PENDING = -1
"""Stands for tokens that the supervisor does not have yet.  The only token of a slice: what ``Step.depends_on_step``,
or in a pipeline of one stage the step before, sampled for the sequence.  All drafts of a slice: those
that the draft stage in the output stage's daemon made for the sequence last, of several stages behind
``Step.drafts_of``."""


class Dry(msgspec.Struct, frozen=True, array_like=True):
    """Settings of the DRY penalty: a token that would continue a repetition of n >= ``allowed_length`` tokens loses
    ``multiplier * base ** (n - allowed_length)``. ``last_n``: tokens that are searched, -1 all. ``breakers``: token
    sequences that no repetition extends across."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    breakers: tuple[tuple[int, ...], ...] = ()


class Mirostat(msgspec.Struct, frozen=True, array_like=True):
    """Settings of mirostat ``version`` 1 or 2: a target surprise ``tau`` in bits, approached at rate ``eta``."""

    version: int
    tau: float = 5.0
    eta: float = 0.1


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of one sequence. The result depends on (``seed``, position, logits, tokens before) alone.

    ``temperature`` 0 is greedy; the defaults disable filters and penalties. The repetition penalty counts prompt and
    output, the others the output alone. ``mirostat`` replaces the filters. ``n_top_logprobs`` -1: no log-probabilities;
    n >= 0: of the sampled token and the n best, and behind these of ``logprob_token_ids``."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    n_top_logprobs: int = -1
    banned: tuple[int, ...] = ()  # ids never sampled (vocabulary padding, ignore_eos)
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry: Dry | None = None
    mirostat: Mirostat | None = None
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """True if the tokens before count."""
        return self.penalised or self.dry is not None

    @property
    def stateless(self) -> bool:
        """True if a draw needs its row and position alone, and reports nothing but the token."""
        return not self.needs_history and self.mirostat is None and self.n_top_logprobs < 0

    @property
    def max_tops(self) -> int:
        """Pairs that come with a sampled token at most, -1 without log-probabilities."""
        return self.n_top_logprobs + len(self.logprob_token_ids) if self.n_top_logprobs >= 0 else -1

    @property
    def uses_mirostat(self) -> bool:
        return self.mirostat is not None and not self.greedy

    @property
    def sorts(self) -> bool:
        """True if a filter looks at the whole vocabulary in order of probability."""
        return self.typical_p < 1.0 or self.top_n_sigma > 0.0 or self.xtc_probability > 0.0


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """An image in a sequence: ``height`` rows of ``width`` tokens from position ``start`` on.  The ids of its tokens
    mean nothing to a model; their embedding rows come with the steps."""

    start: int
    height: int
    width: int

    @property
    def stop(self) -> int:
        return self.start + self.height * self.width


class OpenSequence(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Start a sequence. ``state``: its live recurrent state. ``history``: context tokens that no slice will carry, for
    penalties. ``mu``: mirostat's state. ``n_prompt``: tokens of the context that were not generated. ``images``:
    ascending. ``adapter``: the name of its LoRA adapter; empty: none."""

    sequence: int
    state: int
    sampling: SamplingParams
    history: list[int] = []
    mu: float | None = None
    n_prompt: int = 0
    images: tuple[ImageSpan, ...] = ()
    adapter: str = ""


class CloseSequence(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Drop a sequence.  Its pages and state return to the supervisor."""

    sequence: int


class SetPages(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """``table[kv_group][first : first + len(pages)] = pages``: entry i holds positions [64 i, 64 i + 64)."""

    sequence: int
    kv_group: KvGroup
    first: int
    pages: list[int]


class CopyPage(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Copy the first ``n_tokens`` positions of a page (copy-on-write of a partial page)."""

    kv_group: KvGroup
    source: int
    target: int
    n_tokens: int


class CopyState(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Copy a recurrent state: take a checkpoint, or start from one."""

    source: int
    target: int


class ZeroState(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Reset a recurrent state to that of an empty context."""

    state: int


class UseState(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Commit a verify slice: let its sequence continue from ``state``, one of its ``Slice.states``, before any other
    use of these. Daemons compute a draft's state from the stored updates in place of the live state, whose id stays;
    one that the last slice did not leave changes nothing. Any other becomes the live state."""

    sequence: int
    state: int


class PageOut(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Page out entries of the ``full`` table of a sequence, ascending; all others keep their numbers. ``hosts[i]``: the
    page in host memory that gets ``entries[i]``; []: they are dropped. For entries right behind the table, which left
    before the daemon started, nothing is copied."""

    sequence: int
    entries: list[int]
    hosts: list[int] = []


class PageIn(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Page in entries of the ``full`` table of a sequence, ascending: ``pages[i]`` gets the bytes of ``entries[i]``
    from host memory, whose page there returns to the supervisor."""

    sequence: int
    entries: list[int]
    pages: list[int]


Operation = OpenSequence | CloseSequence | SetPages | CopyPage | CopyState | ZeroState | UseState | PageOut | PageIn


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one sequence in a step: ``tokens[i]`` is at position ``start + i``; a decode may be
    ``[PENDING]``.

    ``sample``: sample the next token from the last row.  A decode is a slice of one token, a prefill chunk is longer.
    A verify slice ends with ``n_drafts`` draft tokens, which may all be ``PENDING``: one token is sampled from the row
    before the first draft, and one from the row of each draft that equals the token sampled before it, up to the first
    rejected draft.
    ``states``: ids of the recurrent states after each of the last ``len(states)`` tokens, all different; if each token
    has one, those after the first are states of drafts (see UseState).  [] stores only the state after the last token,
    in place.
    ``num_draft_tokens``: tokens to draft after the last sampled one.
    ``draft_from``: the draft stage attends to positions from there on; it has no state of earlier ones.
    ``masked``: a Masks message says which tokens each of its rows may draw.
    ``logprob_targets[i]``: the token that follows row i, whose log-probability is wanted.
    ``pooled``: the slice ends a text, whose pooled hidden state is wanted.
    """

    sequence: int
    start: int
    tokens: list[int]
    sample: bool
    n_drafts: int = 0
    states: list[int] = []
    num_draft_tokens: int = 0
    draft_from: int = 0
    masked: bool = False
    logprob_targets: list[int] = []
    pooled: bool = False

    @property
    def n_context(self) -> int:
        """Number of tokens before the drafts."""
        return len(self.tokens) - self.n_drafts

    @property
    def drafts(self) -> list[int]:
        return self.tokens[self.n_context :]

    @property
    def drafts_pend(self) -> bool:
        """True if the supervisor does not have the drafts yet."""
        return self.n_drafts > 0 and self.tokens[-1] == PENDING

    def with_drafts(self, found: Sequence[int]) -> Slice:
        """Return the slice with drafts in place of pending ones, padded with the last token to the same length."""
        known = [*self.tokens[: self.n_context], *found[: self.n_drafts]]
        return replace(self, tokens=known + known[-1:] * (len(self.tokens) - len(known)))


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A step plan (vLLM's scheduler output): operations, in order, then the slices, then the outputs to return.

    ``region``: that of the arenas for its boundary activations, rows in slice order. ``rank_pages``: sequences for
    which every stage returns the attention of their slice's last rows to each earlier page. Payload, for the first
    stage: float32 embedding rows of the slices' image tokens, in order."""

    step_id: int
    region: int
    operations: list[Operation] = []
    slices: list[Slice] = []
    want_logits: bool = False  # payload of the output stage: float32 logits [T, V] of every row
    want_hidden: bool = False  # payload of each stage: float32 residual stream [n_layers (+1 with embedding), T, E]
    rank_pages: list[int] = []
    depends_on_step: int = 0  # the step that samples its pending tokens; 0: none, or there is one stage
    drafts_of: int = 0  # the step behind which its pending drafts are made, likewise
    upkeep: bool = False  # the draft stage in the output stage's daemon runs it without a DraftStep

    @property
    def waits_for_tokens(self) -> bool:
        """True if the first of several stages starts it when the output stage's daemon publishes tokens or drafts."""
        return self.depends_on_step > 0 or self.drafts_of > 0

    @property
    def n_tokens(self) -> int:
        return sum([len(s.tokens) for s in self.slices])  # a list is quicker: every step is counted


class Attach(msgspec.Struct, frozen=True, array_like=True):
    """First message of a connection for rows: the boundary, and the epoch of the daemon that connects."""

    capture: bool
    boundary: int
    epoch: int


class Attached(msgspec.Struct, frozen=True, array_like=True):
    """Answer to Attach; False: a connection of a later epoch is there."""

    accepted: bool


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a step, in the payload, from the stage that computed them to the one that reads them. ``capture`` and
    ``boundary`` as in ArenaPlan. ``sequence`` counts the frames of a connection and boundary from 0."""

    capture: bool
    boundary: int
    region: int
    step_id: int
    epoch: int
    sequence: int


class RowsCopy(Rows, frozen=True, array_like=True):
    """Boundary rows of a step for the supervisor, sent before the answer of the step."""


class PlacedRows(Rows, frozen=True, array_like=True):
    """Rows of a step from the supervisor, where those of the stage before are lost with it, or are computed again."""


class Masks(msgspec.Struct, frozen=True, array_like=True):
    """Token masks (grammar bitmasks) of a step's masked slices, for the output stage, sent before or after the Step.

    Payload: ``n_rows`` bit rows of ``row_bytes`` each, ``n_drafts + 1`` per slice, in order; token t is allowed if bit
    ``t % 8`` of byte ``t // 8`` is set. Tokens beyond the row are not allowed."""

    step_id: int
    n_rows: int
    row_bytes: int


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """A sampled token, with its ``logprob`` and the ``top`` (id, log-probability) pairs if requested, and mirostat's
    ``mu`` after it."""

    sequence: int
    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []
    mu: float | None = None


def tokens_by_sequence(sampled: Sequence[Sampled]) -> dict[int, list[int]]:
    """Return the sampled tokens of each sequence, in order."""
    found: dict[int, list[int]] = {}
    for one in sampled:
        found.setdefault(one.sequence, []).append(one.token)
    return found


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of given tokens of a sequence from position ``start`` on, and of the best (id,
    log-probability) pairs at each; their number is that of the sampled tokens."""

    sequence: int
    start: int
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]


class DraftStep(msgspec.Struct, frozen=True, array_like=True):
    """A step for the draft stage, after the output stage ran it: operations, the drafter's state of all slices, then
    drafts. Answered by a StepResult.

    ``tokens[i]``: sampled for slice i. None: the output stage of this daemon has them, and the message may come
    before it has answered."""

    step: Step
    tokens: list[list[int]] | None = None


class Drafted(msgspec.Struct, frozen=True, array_like=True):
    """Drafts of a sequence: tokens expected to follow the one sampled last, and the probability the drafter gives
    each."""

    sequence: int
    tokens: list[int]
    probabilities: list[float] = []


class PageScores(msgspec.Struct, frozen=True, array_like=True):
    """Attention of a slice to each whole page before it, by entry of the ``full`` table, summed over the stage's
    layers."""

    sequence: int
    scores: list[float]


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """A stage finished a step; its boundary rows, if any, are in the arena region."""

    step_id: int
    stage: int
    sampled: list[Sampled] = []  # of the output stage; of the first stage, the tokens used for its placeholders
    compute_s: float = 0.0  # from receiving the plan to rows ready
    wait_s: float = 0.0  # how long the compute thread waited for this plan and its rows
    # payload: (name, shape) of consecutive float32 arrays; of the output stage "pooled" [n, width] of such slices
    segments: list[tuple[str, list[int]]] = []
    drafts: list[Drafted] = []  # of the draft stage
    prompt_logprobs: list[PromptLogprobs] = []  # of the output stage
    page_scores: list[PageScores] = []  # of slices that ask for it
    hop_s: float = 0.0  # of a posted step: from the doorbell of its rows until this stage took them
    upkeep_s: float = 0.0  # of the output stage: time of the draft stage for upkeep steps since the last result
    cold: bool = False  # the step's shape is captured, but had no graph yet: the next ones are faster
    invalid: list[int] = []  # of the output stage: sequences whose logits are NaN or infinite; their tokens are void


class CancelPending(msgspec.Struct, frozen=True):
    """Drop the posted steps sent before this that have not begun, and all after them, because an earlier stage was
    lost. Answered by PendingCancelled."""

    stage: int


class PendingCancelled(msgspec.Struct, frozen=True):
    """Answer to CancelPending: the dropped steps. ``operations_applied``: those of the first of them were already."""

    stage: int
    step_ids: list[int]
    operations_applied: bool


class Reset(msgspec.Struct, frozen=True):
    """Drop all sequences; weights and pools stay.  Answered by ResetDone."""

    token: int


class ResetDone(msgspec.Struct, frozen=True):
    """Answer to Reset.  No step sent before the Reset is answered after this."""

    token: int  # of the Reset
