"""A draft stage in memory: test equipment for the pure core of the engine.

Like a real one it keeps pages and states under the ids of the target's, and learns tokens from the steps it gets.  It
checks that everything it may attend to is there: positions from ``draft_from`` on must hold what was computed for the
tokens of the request, in its own pages, and the states that the plan names must be those of the last token kept.  What
it drafts comes from the oracle, wrong as often as it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import (
    CopyState,
    Drafted,
    DraftStep,
    OpenSequence,
    Operation,
    Sampled,
    SamplingParams,
    Slice,
    Step,
    StepResult,
    UseState,
)
from tests.engine.toy_pipeline import (
    MADE,
    PLACED,
    VOCABULARY,
    ToyDaemon,
    ToyLimits,
    ToyModel,
    ToyStage,
    Violation,
    _Open,
    mix,
)

Oracle = Callable[[SamplingParams], list[int]]
"""All tokens of the request with this sampling, prompt and answer: every request has a seed of its own."""


class ToyDrafter(ToyStage):
    """``wrong``: of so many drafts, one is wrong (0: none).  ``captures``: the regions of the target's arenas."""

    def __init__(
        self,
        model: ToyModel,
        pools: PoolSizes,
        captures: dict[tuple[int, int], tuple[int, list[int]]],
        oracle: Oracle,
        wrong: int,
        n_most: int = 100,
    ) -> None:
        super().__init__(model, model.n_stages, replace(pools, state_pages=0), {})
        self._captures, self._oracle, self._wrong, self._n_most = captures, oracle, wrong, n_most
        self.n_drafted = 0
        self.made: dict[int, list[int]] = {}  # drafts by sequence
        self.after: dict[int, tuple[int, int]] = {}  # by state: the position and token it was written after

    def run_drafts(self, message: DraftStep, sampled: list[Sampled] | None) -> StepResult:
        """Execute a step; ``sampled``: by the output stage of its daemon."""
        step = message.step
        self.take_operations(step.operations)
        for stage in range(self.model.n_stages if step.slices else 0):
            writer, rows = self._captures[stage, step.region]
            if writer in (step.step_id, PLACED):
                continue
            # a rebuild runs a step again that waits behind the stage, in the step's own region
            if not {*rows} <= {*self._captures[MADE - stage, step.step_id][1]}:
                raise Violation(f"region {step.region} was overwritten before step {step.step_id} was drafted")
        tokens = message.tokens
        if tokens is None:
            if sampled is None:
                raise Violation(f"nobody in this daemon knows the tokens of step {step.step_id}")
            tokens = [[s.token for s in sampled if s.sequence == piece.sequence] for piece in step.slices]
        drafts = []
        for piece, new in zip(step.slices, tokens, strict=True):
            self._take(piece, new)
            self.made.pop(piece.sequence, None)
            if piece.num_draft_tokens:
                self.made[piece.sequence] = self._draft(piece, new)
                drafts.append(Drafted(piece.sequence, self.made[piece.sequence]))
        return StepResult(step.step_id, self.stage, compute_s=0.25, drafts=[d for d in drafts if d.tokens])

    def with_drafts(self, step: Step) -> Step:
        """A step with the drafts that it verifies, which were made behind the step before."""
        slices = []
        for piece in step.slices:
            if piece.drafts_pend:
                if piece.sequence not in self.made:
                    raise Violation(f"sequence {piece.sequence}: no drafts were made for {piece}")
                piece = piece.with_drafts(self.made.pop(piece.sequence))
            slices.append(piece)
        return replace(step, slices=slices)

    def take_operations(self, operations: Sequence[Operation]) -> None:
        """Execute the operations of a step."""
        for operation in operations:
            self._operate(operation)
            if isinstance(operation, CopyState):
                self.after[operation.target] = self.after.get(operation.source, (-1, -1))

    def _operate(self, operation: object) -> None:
        if isinstance(operation, OpenSequence) and operation.history:
            operation = OpenSequence(operation.sequence, operation.state, operation.sampling)
        if isinstance(operation, UseState) and not self.sequences[operation.sequence].states:
            return  # attached between a verify step and its verdict
        super()._operate(operation)

    def _settle(self, sequence: _Open, state: int) -> None:
        if state in sequence.states:
            self.after[sequence.state] = self.after[state]
        sequence.states = []

    def _take(self, piece: Slice, new: list[int]) -> None:
        """Keep the state of a slice's tokens."""
        sequence = self.sequences.get(piece.sequence)
        if sequence is None:
            raise Violation(f"a slice of sequence {piece.sequence}, which is not open")
        right = self._oracle(sequence.sampling)
        sure = piece.tokens[: len(piece.tokens) - piece.n_drafts]
        if right[piece.start : piece.start + len(sure)] != sure:
            raise Violation(f"sequence {piece.sequence}: tokens at {piece.start} are not those of its request")
        if bool(new) != piece.sample:
            raise Violation(f"sequence {piece.sequence}: sampled {new}, sample is {piece.sample}")
        self._settle(sequence, sequence.state)
        if KvGroup.RECURRENT in self.model.kv_groups and piece.start > piece.draft_from:
            before = (piece.start - 1, right[piece.start - 1])
            if self.after.get(sequence.state) != before:
                raise Violation(
                    f"state {sequence.state} of sequence {piece.sequence} is that after "
                    f"{self.after.get(sequence.state)}, not after {before}"
                )
        after = self._states_after(sequence, piece)
        for i, token in enumerate(piece.tokens):
            position = piece.start + i
            self._page(sequence, KvGroup.FULL, position)[position % PAGE_TOKENS] = (position, mix(token, position))
            if len(piece.tokens) - i <= len(after):
                self.after[after[i - len(piece.tokens)]] = (position, token)

    def _draft(self, piece: Slice, new: list[int]) -> list[int]:
        """Attend to all there is, and draft behind the token sampled last."""
        sequence = self.sequences[piece.sequence]
        right = self._oracle(sequence.sampling)
        stop = piece.start + len(piece.tokens) - piece.n_drafts + len(new) - 1  # the position of the last new token
        if piece.draft_from >= stop:
            raise Violation(f"sequence {piece.sequence}: drafts asked without context, {piece.draft_from} to {stop}")
        for position in range(piece.draft_from, stop):
            if sequence.is_out(KvGroup.FULL, position):
                continue
            held = self._page(sequence, KvGroup.FULL, position)[position % PAGE_TOKENS]
            if held != (position, mix(right[position], position)):
                raise Violation(f"sequence {piece.sequence}: the drafter has {held} for position {position}")
        last = piece.start + len(piece.tokens) + piece.num_draft_tokens
        for position in range(stop, last + 1):  # noise, overwritten by what is kept
            self._page(sequence, KvGroup.FULL, position)[position % PAGE_TOKENS] = (-1, 0)
        found = right[stop + 1 : stop + 1 + min(piece.num_draft_tokens, self._n_most)]
        self.n_drafted += len(found)
        return [
            (t + 1) % VOCABULARY if self._wrong and mix(stop, i, piece.sequence) % self._wrong == 0 else t
            for i, t in enumerate(found)
        ]


def drafter_daemon(drafter: ToyDrafter, limits: ToyLimits) -> ToyDaemon:
    """A daemon that runs the draft stage alone."""
    daemon = ToyDaemon({}, limits)
    daemon.drafter = drafter
    return daemon
