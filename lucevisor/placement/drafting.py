"""What drafts: a drafter, prompt lookup, both or nothing; where the drafter runs; how many drafts a step verifies.

Pure.  Invariant: a drafter that is configured by kind is placed or the plan is refused; an automatic one may be left
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lucevisor.config import Config
from lucevisor.model.drafters import DraftSpec
from lucevisor.model.values import Backend
from lucevisor.placement.devices import Inventory, TargetDevice, find_device
from lucevisor.placement.result import DraftPolicy, Infeasible, PlacedDrafter, Placement, PlacementError
from lucevisor.protocol.loading import DraftKind

LOOKUP_DRAFTS = 8
"""``auto`` without a drafter: repeated text is accepted in long runs."""
REFERENCE_TOKENS = 32768
"""Context that an automatic drafter must leave room for, and that automatic ranges are balanced for."""
MIN_DRAFTS = 4
"""``auto``: not fewer than these, however many sequences run at once."""


@dataclass(frozen=True, slots=True)
class DrafterSizing:
    """A drafter on ``target``.  ``with_output``, ``with_embedding``: these weights of the model are there, too."""

    spec: DraftSpec
    target: TargetDevice
    with_output: bool
    with_embedding: bool

    @property
    def kind(self) -> DraftKind:
        return DraftKind(self.spec.model.architecture)


def draft_inputs(
    config: Config, drafter: DraftSpec | None, targets: Sequence[TargetDevice], inventory: Inventory | None
) -> DrafterSizing | None:
    """Place the drafter where ``draft.device`` says, else beside the last layers.

    Raises PlacementError for a device that does not exist.
    """
    if drafter is None:
        return None
    output, device = targets[-1], config.draft.device
    if device is None:
        target = output
    else:
        backend = Backend(config.groups[device.group].backend)
        target = TargetDevice(device, backend, find_device(config, "draft.device", device, backend, inventory))
    one_stage = all(each.device.group == output.device.group for each in targets)
    with_output = _same_place(target, output)
    return DrafterSizing(drafter, target, with_output, with_output and one_stage and _same_place(target, targets[0]))


def _same_place(a: TargetDevice, b: TargetDevice) -> bool:
    """Whether two devices are one to a daemon: all indices of a cpu group are."""
    return a.device == b.device or (a.device.group == b.device.group and a.backend is Backend.CPU)


def choose_drafting(config: Config, draft: DrafterSizing | None) -> DraftPolicy:
    """Choose what drafts beside ``draft``, and the width.  Raises PlacementError for one beyond the drafter's.

    An automatic width lets all sequences together draft about a chunk, as their steps get that much longer.
    """
    lookup = config.draft.kind in ("auto", "lookup")
    width, engine = config.draft.width, config.engine
    if draft is None and not lookup:
        return DraftPolicy()
    most = LOOKUP_DRAFTS if draft is None else draft.spec.max_drafts
    if width == "auto":
        wanted = most if draft is None else min(most, 2 * draft.spec.default_drafts)
        return DraftPolicy(lookup, min(wanted, max(MIN_DRAFTS, engine.least_chunk // engine.max_sequences)))
    if draft is not None and width > most:
        why = f"is more than the {most} tokens that the drafter {draft.spec.model.name} drafts"
        raise PlacementError("draft.width", width, why, f"nearest: {most}", file=str(config.file))
    return DraftPolicy(lookup, width, fixed=True)


def draft_stage(draft: DrafterSizing | None, n_stages: int) -> PlacedDrafter | None:
    """Return the stage behind the last of ``n_stages``."""
    if draft is None:
        return None
    target, spec = draft.target, draft.spec
    return PlacedDrafter(n_stages, target.device, target.backend, draft.kind, spec.layers, spec.captures)


def too_dear(result: Placement | Infeasible, without: Placement | Infeasible) -> str:
    """Return why an automatic drafter is left out; empty if it is used.

    It is used where it fits and leaves room for a sequence of REFERENCE_TOKENS, if there is such room without it.
    """
    if isinstance(result, Infeasible):
        return result.message.splitlines()[0]
    if isinstance(without, Infeasible) or result.max_context >= min(without.max_context, REFERENCE_TOKENS):
        return ""
    return f"the longest sequence that fits would be {result.max_context} tokens instead of {without.max_context}"


def left_out(result: Placement | Infeasible, draft: DrafterSizing, reason: str) -> Placement | Infeasible:
    """Return a plan without the drafter that says so."""
    kind, name = draft.kind, draft.spec.model.name
    notice = f"the drafter {name} on {draft.target.device} is left out: {reason}; draft.kind = {kind} insists on it"
    if isinstance(result, Infeasible):
        return result  # the model alone is too large: nothing else matters
    return replace(result, draft_left_out=reason, notices=(*result.notices, notice))
