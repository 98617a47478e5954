"""Inputs of the draft stage: captures of the target's layers (auxiliary hidden states), tokens, and sampled ones.

Invariant: the inputs of a step are dropped once its DraftStep ran, and only as many steps are stored as may be in
flight, so a detached draft stage costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch import Tensor

from daemons.async_output import AsyncDrafts, PlaceholderFill
from daemons.boundary import BoundaryBuffer
from daemons.draft.stage import DraftStage
from daemons.errors import StateError
from lucevisor.protocol.arena import SharedBuffer
from lucevisor.protocol.loading import DraftPlan, arena_regions
from lucevisor.protocol.steps import Drafted, DraftStep, Sampled, Slice, Step, tokens_by_sequence


@dataclass(slots=True)
class _StepInputs:
    """Inputs of one step: captures by stage, and the tokens sampled for each slice if the output stage is here.

    ``slices``: with the tokens they started from, which a step that ran ahead lacks.
    """

    captures: dict[int, Tensor] = field(default_factory=dict)
    slices: list[Slice] | None = None
    tokens: list[list[int]] | None = None


class DraftInputs:
    """Stores what the stages of this daemon compute for the draft stage, and reads the rest from arenas."""

    def __init__(
        self,
        plan: DraftPlan,
        boundaries: Sequence[BoundaryBuffer],
        await_captures: Callable[[SharedBuffer, Step], None] = lambda rows, step: None,
    ) -> None:
        self.plan, self._boundaries, self._await_captures = plan, boundaries, await_captures
        self._kept: dict[int, _StepInputs] = {}
        self._lent: dict[int, _StepInputs] = {}  # by stage: the last step, whose captures are the stage's own memory
        self._drafts: dict[int, Sequence[int]] = {}  # newest drafts by sequence, not verified yet
        self._async_drafts: AsyncDrafts | None = None  # newer ones that the host does not have yet
        self._max_steps = arena_regions(plan.stage + 1)
        self._copies: torch.cuda.Stream | None = None

    def store_captures(self, step: Step, stage: int, captures: Tensor) -> None:
        """Store a stage's captures, which its next step overwrites unless ``copy_captures`` is called before it."""
        kept = self._lent[stage] = self._of(step)
        kept.captures[stage] = captures

    def copy_captures(self, stage: int) -> None:
        """Copy a stage's last captures if they are still stored, before the stage runs again."""
        kept = self._lent.pop(stage, None)
        if kept is not None and stage in kept.captures:
            kept.captures[stage] = kept.captures[stage].clone()

    def store_slices(self, step: Step, slices: list[Slice]) -> None:
        """Store the slices of a step with the tokens it started from, in place of those of a cancelled run."""
        self._of(step).slices = slices

    def store_tokens(self, step: Step, sampled: Sequence[Sampled]) -> None:
        if step.upkeep:
            return  # no DraftStep asks for them
        found = tokens_by_sequence(sampled)
        self._of(step).tokens = [found.get(s.sequence, []) for s in step.slices]

    def _of(self, step: Step) -> _StepInputs:
        kept = self._kept.setdefault(step.step_id, _StepInputs())
        if len(self._kept) > self._max_steps:
            self._kept.pop(next(iter(self._kept))).captures.clear()
        return kept

    def pop_step(self, message: DraftStep) -> tuple[Step, list[Tensor], list[list[int]]]:
        """Remove a step's inputs and return them: the step with the tokens it started from, captures [T, n E] of each
        source, valid during the step, and the tokens sampled for each slice.

        Raises StateError if this daemon lacks some.
        """
        step = message.step
        kept = self._pop(step.step_id)
        if not step.slices:  # a stage here may have computed some alone, which is not for the drafter
            return step, [], []
        if kept.slices is not None:
            step = replace(step, slices=kept.slices)
        tokens = kept.tokens if message.tokens is None else message.tokens
        if tokens is None or len(tokens) != len(step.slices):
            found = "no" if tokens is None else f"{len(tokens)} lists of"
            raise StateError(f"draft step {step.step_id}", f"{found} sampled tokens for {len(step.slices)} slices")
        captures = self._captures(step, kept)
        kept.captures.clear()
        return step, captures, tokens

    def _captures(self, step: Step, kept: _StepInputs) -> list[Tensor]:
        captures = []
        for source in self.plan.sources if step.n_tokens else ():
            if source.arena is not None:
                self._await_captures(self._boundaries[source.arena].buffer, step)
                rows = self._boundaries[source.arena].read(step)
            elif source.stage in kept.captures:
                rows = kept.captures[source.stage]
            else:
                reason = f"stage {source.stage} of this daemon has kept no captures of it"
                raise StateError(f"draft step {step.step_id}", reason)
            captures.append(rows)
        return captures

    def extend(self, stage: DraftStage, message: DraftStep | None, drawn: Tensor | None) -> None:
        """Extend the drafter's context by a step before its tokens are known, if the drafter can.  ``run`` comes later.

        ``drawn``: a token for each row that samples, on the device.  All earlier messages must have run.  Raises
        StateError.
        """
        kept = None if message is None else self._kept.get(message.step.step_id)
        if message is None or kept is None:
            return
        step = message.step if kept.slices is None else replace(message.step, slices=kept.slices)
        if stage.extends_ahead(step):
            stage.extend(step, self._copied(self._captures(step, kept), stage), drawn)

    def run(self, stage: DraftStage, message: DraftStep, *, defer: bool = False) -> list[Drafted] | AsyncDrafts:
        """Run the draft stage for a step and return its drafts.

        ``defer`` as in DraftStage.run; then ``finish_drafts`` returns them.  Raises StateError.
        """
        step, captures, tokens = self.pop_step(message)
        if not stage.has_extended(step):
            captures = self._copied(captures, stage)
        drafts = stage.run(step, captures, tokens, defer=defer) if step.n_tokens else []
        for s in step.slices:
            self._drafts.pop(s.sequence, None)
        if isinstance(drafts, AsyncDrafts):
            self._async_drafts = drafts
        else:
            self._made(drafts)
        return drafts

    def finish_drafts(self, async_drafts: AsyncDrafts) -> list[Drafted]:
        """Wait for drafts that only the device has.  Call it before the next ``run``."""
        drafts = async_drafts.wait()
        self._made(drafts)
        return drafts

    def _made(self, drafts: Sequence[Drafted]) -> None:
        for found in drafts:
            if not found.tokens:
                raise StateError(
                    f"drafts of sequence {found.sequence}", "the drafter made none, and some were asked for"
                )
        self._drafts |= {found.sequence: found.tokens for found in drafts}
        self._async_drafts = None

    def _copied(self, captures: list[Tensor], stage: DraftStage) -> list[Tensor]:
        """Return captures on the drafter's GPU; those in arenas are copied, as the next step may overwrite them.

        The copies run on a stream of their own, which does not wait for queued steps.
        """
        if stage.device.type == "cpu" or all(rows.device.type != "cpu" for rows in captures):
            return captures
        device = stage.device
        if self._copies is None:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            found = [rows.to(device, non_blocking=True) for rows in captures]
        self._copies.synchronize()
        for rows, given in zip(found, captures, strict=True):
            if rows is not given:
                rows.record_stream(torch.cuda.current_stream(device))
        return found

    @property
    def drafts_wait(self) -> bool:
        """True if there are drafts that the host does not have yet."""
        return self._async_drafts is not None

    def with_drafts(self, step: Step) -> tuple[Step, PlaceholderFill | None]:
        """Return a step with the drafts that its slices are to verify; 0 where only the device has them, which the
        second result puts in place.  Raises StateError where none were made.
        """
        if not any(s.drafts_pend for s in step.slices):
            return step, None
        drafts, places, row = self._async_drafts, list[tuple[int, int]](), 0
        made = [] if drafts is None else drafts.sequences
        n_made = 0 if drafts is None else drafts.tokens.shape[1]
        for s in step.slices:
            first, end = row + s.n_context, row + len(s.tokens)
            if s.drafts_pend and s.sequence in made:
                at = made.index(s.sequence) * n_made
                places += [(first + i, at + min(i, n_made - 1)) for i in range(end - first)]
            row = end
        filled = _filled(step.slices, {sequence: [0] * n_made for sequence in made} | self._drafts, needed=True)
        if not places:
            for s in step.slices:
                self._drafts.pop(s.sequence, None)
        fill = PlaceholderFill.of(drafts.tokens.reshape(-1), places) if drafts is not None and places else None
        return replace(step, slices=filled), fill

    def refill_draft_placeholders(self, slices: Sequence[Slice]) -> list[Slice]:
        """Return slices with the drafts that they verify in place of placeholders."""
        return _filled(slices, self._drafts)

    def _pop(self, step_id: int) -> _StepInputs:
        """Remove and return the inputs of a step; drop those of all earlier steps."""
        while step_id in self._kept:
            first = next(iter(self._kept))
            kept = self._kept.pop(first)
            if first == step_id:
                return kept
            kept.captures.clear()
        return _StepInputs()

    def reset(self) -> None:
        self._kept.clear()
        self._lent.clear()
        self._drafts.clear()
        self._async_drafts = None


def _filled(slices: Sequence[Slice], drafts: Mapping[int, Sequence[int]], *, needed: bool = False) -> list[Slice]:
    """Slices with drafts in place of pending ones.  Raises StateError where they are ``needed`` and there are none."""
    found = []
    for s in slices:
        if s.drafts_pend and (needed or s.sequence in drafts):
            if s.sequence not in drafts:
                raise StateError(f"slice of sequence {s.sequence} at {s.start}", "no drafts were made before it")
            s = s.with_drafts(drafts[s.sequence])
        found.append(s)
    return found
