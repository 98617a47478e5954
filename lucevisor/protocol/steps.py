"""Records of a step: operations on state, slices of tokens, what comes back.  No sockets, no tensors.

The hot path: all of them are encoded as arrays.
"""

from __future__ import annotations

import msgspec

from lucevisor.model.values import Space


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the tail stage turns the logits of one sequence into a token.

    ``temperature`` 0 is greedy.  ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch a filter off.  ``repetition_penalty``
    1, ``presence_penalty`` 0 and ``frequency_penalty`` 0 switch a penalty off; penalties count the whole prompt and
    output.  ``seed`` makes the choice a function of (seed, position, logits) alone: it depends neither on the batch nor
    on the placement or a restart.  ``n_top_logprobs`` -1: no log-probabilities; n >= 0: that of the chosen token and
    the n best.
    """

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
    banned: tuple[int, ...] = ()  # ids never sampled (padding rows of the vocabulary, ignore_eos)

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class OpenSequence(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Start a sequence.  ``state`` is its live recurrent state; ``history`` (ids already in the context that no slice
    will carry) seeds the penalties."""

    sequence: int
    state: int
    sampling: Sampling
    history: list[int] = []


class CloseSequence(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Forget a sequence.  Its pages and state belong to the supervisor again."""

    sequence: int


class SetPages(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """``table[space][first : first + len(pages)] = pages``: entry i holds positions [64 i, 64 i + 64)."""

    sequence: int
    space: Space
    first: int
    pages: list[int]


class CopyPage(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Copy the first ``n_tokens`` positions of a page (copy-on-write of a partial page)."""

    space: Space
    source: int
    target: int
    n_tokens: int


class CopyState(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Copy a recurrent state (take a checkpoint, or start from one)."""

    source: int
    target: int


class ZeroState(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Reset a recurrent state to the start of a text."""

    state: int


Operation = OpenSequence | CloseSequence | SetPages | CopyPage | CopyState | ZeroState


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one sequence in a step: ``tokens[i]`` stands at position ``start + i``.

    ``sample``: draw the next token from the last row.  A decode is a slice of one token, a prefill chunk a longer one.
    A verify slice ends with ``n_drafts`` proposed tokens: a token is drawn from the row before the first draft, and
    from the row of each draft that equals the token drawn before it.  What is drawn after a rejected draft is not sent.
    """

    sequence: int
    start: int
    tokens: list[int]
    sample: bool
    n_drafts: int = 0


class Step(msgspec.Struct, frozen=True, array_like=True):
    """The step plan: operations first, in order, then the slices, then what is wanted back.

    ``region`` is the arena region that carries this step's boundary activations, rows in slice order.
    Operations are executed by every stage; a stage runs its steps in the order received.
    """

    step_id: int
    region: int
    operations: list[Operation] = []
    slices: list[Slice] = []
    want_logits: bool = False  # tail: float32 logits [T, V] of every row, as payload
    want_hidden: bool = (
        False  # each stage: float32 residual stream [n_layers of the stage (+1 at the head), T, E], as payload
    )

    @property
    def n_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.slices)


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """A token drawn by the tail.  ``logprob`` of it and the ``top`` (id, log-probability) pairs, when asked for."""

    sequence: int
    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """A stage finished a step; the boundary rows (if any) are in the arena region."""

    step_id: int
    stage: int
    sampled: list[Sampled] = []
    compute_s: float = 0.0  # from plan received to rows ready
    wait_s: float = 0.0  # how long the compute thread had waited for this plan
    segments: list[tuple[str, list[int]]] = []  # payload: (name, shape) of float32 arrays, one after the other


class Reset(msgspec.Struct, frozen=True):
    """Drop every sequence; weights and pools stay.  Answered by ResetDone."""

    token: int


class ResetDone(msgspec.Struct, frozen=True):
    """Answer to Reset: no step sent before it is answered any more."""

    token: int  # of the Reset
