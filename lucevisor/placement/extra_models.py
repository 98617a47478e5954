"""Placement and sizes of the models beside the served one: a drafter, the scoring model of PFlash, a vision encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from msgspec import structs

from lucevisor.config import Config, DeviceRef
from lucevisor.model.drafters import DraftSpec
from lucevisor.model.drafters.spec import MAX_DRAFT_TOKENS, MAX_RECURRENT_DRAFTS
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, KvGroup, LayerRange
from lucevisor.model.vision import VisionSpec
from lucevisor.placement.cost import CostModel, MemoryUse, StepSizes
from lucevisor.placement.devices import Inventory, TargetDevice, find_device, first_seen, memory_share
from lucevisor.placement.result import (
    Infeasible,
    PlacedDrafter,
    PlacedEncoder,
    PlacedScorer,
    Placement,
    PlacementError,
    Shard,
)
from lucevisor.protocol.loading import DraftKind, SpeculationSettings, score_pools
from lucevisor.protocol.messages import MAX_PAYLOAD_BYTES

REFERENCE_TOKENS = 32768
"""Context that an automatic drafter must leave room for, and that automatic ranges are balanced for."""


def memory_use(cost: CostModel, shard: Shard, steps: StepSizes) -> MemoryUse:
    return MemoryUse(
        weight_bytes=cost.weight_bytes(shard),
        state_bytes=cost.state_bytes(shard, steps.pools),
        workspace_bytes=cost.workspace_bytes(shard, steps),
        host_state_bytes=cost.host_state_bytes(shard, steps.pools),
    )


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

    def placed(self, stage: int) -> PlacedDrafter:
        target, spec = self.target, self.spec
        return PlacedDrafter(target.device, target.backend, stage, self.kind, spec.layers, spec.captures)


def place_drafter(
    config: Config, drafter: DraftSpec | None, targets: Sequence[TargetDevice], inventory: Inventory | None
) -> DrafterSizing | None:
    """Place the drafter on ``draft.device``, or on the device of the last layers.  Raises PlacementError."""
    if drafter is None:
        return None
    output = targets[-1]
    target = _target(config, "draft.device", config.draft.device, inventory) or output
    single_stage = all(other.device.group == output.device.group for other in targets)
    with_output = _same_place(target, output)
    return DrafterSizing(drafter, target, with_output, with_output and single_stage and _same_place(target, targets[0]))


def _target(config: Config, key: str, device: DeviceRef | None, inventory: Inventory | None) -> TargetDevice | None:
    if device is None:
        return None
    backend = Backend(config.groups[device.group].backend)
    info, share = find_device(config, key, device, backend, inventory), memory_share(config, device, backend)
    same_as = first_seen(config, device, info, inventory)
    return TargetDevice(device, backend, info, share=share, host=config.groups[device.group].host_name, same_as=same_as)


def _same_place(a: TargetDevice, b: TargetDevice) -> bool:
    return a.device == b.device or (a.device.group == b.device.group and a.backend is Backend.CPU)


def choose_drafting(
    config: Config, spec: ModelSpec, draft: DrafterSizing | None, max_sequences: int
) -> SpeculationSettings:
    """Choose what drafts beside ``draft``, and the width.  Raises PlacementError for one beyond the drafter's.

    An automatic width lets all sequences together draft about a chunk.  One that decodes alone may look up as many
    drafts as a slice takes, which needs no more memory.
    """
    lookup = config.draft.kind in ("auto", "lookup")
    width, engine = config.draft.width, config.engine
    kind = DraftKind.MTP if draft is None else draft.kind
    if (draft is None and not lookup) or not spec.pooling.generates:
        return SpeculationSettings()
    recurrent = KvGroup.RECURRENT in spec.kv_groups()
    most = MAX_RECURRENT_DRAFTS if recurrent else MAX_DRAFT_TOKENS
    limit = 8 if draft is None else min(most, draft.spec.max_drafts)
    settings = SpeculationSettings(drafter=draft is not None, lookup=lookup, kind=kind)
    if width == "auto":
        preferred = limit if draft is None else min(limit, 2 * draft.spec.default_drafts)
        n_drafts = min(preferred, max(4, engine.usual_chunk // max_sequences))
        return structs.replace(settings, max_drafts=n_drafts, max_lookup=most if lookup else 0)
    if draft is not None and width > limit:
        why = f"is more than the {limit} tokens that the drafter {draft.spec.model.name} drafts for this model"
        raise PlacementError("draft.width", width, why, f"nearest: {limit}", file=str(config.file))
    if recurrent and width > most:
        why = f"is more than the {most} drafts that a model with recurrent states verifies"
        raise PlacementError("draft.width", width, why, f"nearest: {most}", file=str(config.file))
    return structs.replace(settings, max_drafts=width, fixed=True)


def left_out_reason(result: Placement | Infeasible, without: Placement | Infeasible) -> str:
    """Return why an automatic drafter is left out: it leaves no room for REFERENCE_TOKENS that there is without it."""
    if isinstance(result, Infeasible):
        return result.message.splitlines()[0]
    if isinstance(without, Infeasible) or result.max_context >= min(without.max_context, REFERENCE_TOKENS):
        return ""
    return f"the longest sequence that fits would be {result.max_context} tokens instead of {without.max_context}"


def without_drafter(result: Placement | Infeasible, draft: DrafterSizing, reason: str) -> Placement | Infeasible:
    kind, name = draft.kind, draft.spec.model.name
    notice = f"the drafter {name} on {draft.target.device} is left out: {reason}; draft.kind = {kind} insists on it"
    if isinstance(result, Infeasible):
        return result  # the model alone is too large: nothing else matters
    return replace(result, draft_left_out=reason, notices=(*result.notices, notice))


Placed = TypeVar("Placed", PlacedScorer, PlacedEncoder)


@dataclass(frozen=True, slots=True)
class ExtraSizing(Generic[Placed]):
    """A scoring model, whole but for its output matrix, or a vision encoder on ``target``."""

    placed: Placed
    target: TargetDevice
    n_layers: int
    use: MemoryUse


def place_scorer(
    config: Config,
    scorer: ModelSpec | None,
    targets: Sequence[TargetDevice],
    inventory: Inventory | None,
    dtypes: tuple[Dtype, Dtype],
) -> ExtraSizing[PlacedScorer] | None:
    """Place the scoring model on ``pflash.device``, or on the device of the last layers.

    ``dtypes``: of activations, and of keys and values.  Raises PlacementError, also for a model that cannot score.
    """
    if scorer is None:
        return None
    target, file = _target(config, "pflash.device", config.pflash.device, inventory) or targets[-1], str(config.file)
    if KvGroup.FULL not in scorer.kv_groups():
        why = "is a model none of whose layers attends to all positions: it cannot score"
        raise PlacementError("pflash.path", config.pflash.path, why, "name another model", file=file)
    window_tokens = min(config.pflash.window, scorer.context_tokens)
    if window_tokens < 256:
        why = f"has a context of {window_tokens} tokens; a window takes 256"
        raise PlacementError("pflash.path", config.pflash.path, why, "name another model", file=file)
    # Other stages of its daemon wait for so many.
    step_tokens = min(window_tokens, 512 if target.backend is Backend.CPU else 2048)
    shard = Shard(target.device, target.backend, LayerRange(0, scorer.n_layers), first=True, last=False)
    pools = score_pools(scorer.kv_groups(), window_tokens)
    steps = StepSizes(step_tokens, 1, window_tokens, window_tokens, 1, pools, sampled_rows=0)
    use = memory_use(CostModel(scorer, *dtypes), shard, steps)
    placed = PlacedScorer(target.device, target.backend, scorer.name, window_tokens, step_tokens)
    return ExtraSizing(placed, target, scorer.n_layers, use)


def image_tokens(config: Config, encoder: VisionSpec, target_model: ModelSpec) -> tuple[int, int]:
    """Return the least and the most tokens of an image, which fits a chunk if it is read in one step."""
    vision = config.vision
    most = encoder.max_tokens if vision.max_tokens == "auto" else vision.max_tokens
    if target_model.whole_images:
        most = min(most, config.engine.usual_chunk)
        return min(encoder.min_tokens, most), most
    least = min(encoder.min_tokens, most) if vision.min_tokens == "auto" else vision.min_tokens
    return least, max(least, most)


def place_encoder(
    config: Config,
    encoder: VisionSpec | None,
    target_model: ModelSpec,
    targets: Sequence[TargetDevice],
    inventory: Inventory | None,
    dtype: Dtype,
) -> ExtraSizing[PlacedEncoder] | None:
    """Place the vision encoder on ``vision.device``, or on the device of the first layers, which read its rows.

    Raises PlacementError, also for images that no message takes.
    """
    if encoder is None:
        return None
    target = _target(config, "vision.device", config.vision.device, inventory) or targets[0]
    least, most = image_tokens(config, encoder, target_model)
    limit = MAX_PAYLOAD_BYTES // (4 * encoder.output_size)
    limits = [(limit, f"rows of so many tokens are more than a message takes: {encoder.output_size} numbers each")]
    if encoder.of_projector.fills:  # the narrowest image has all of them in a row
        limits.append((encoder.side // encoder.merge, f"the encoder has {encoder.side} positions for patches of a row"))
    limit, why = min(limits)
    if most > limit:
        raise PlacementError("vision.max_tokens", most, why, f"nearest: {limit}", file=str(config.file))
    use = MemoryUse(
        weight_bytes=encoder.weight_bytes(dtype), state_bytes=0, workspace_bytes=encoder.workspace_bytes(most, dtype)
    )
    placed = PlacedEncoder(target.device, target.backend, encoder.name, least, most)
    return ExtraSizing(placed, target, encoder.n_layers, use)
