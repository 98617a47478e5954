"""Where the scoring model of PFlash runs, and what it takes.  Pure.

Invariant: what it takes does not depend on the served model's context or pages, so it is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lucevisor.config import Config
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, LayerRange, Space
from lucevisor.placement.cost import CostModel, MemoryUse, StepSizes
from lucevisor.placement.devices import Inventory, TargetDevice, find_device
from lucevisor.placement.result import PlacedScorer, PlacementError, Shard
from lucevisor.protocol.loading import score_pools

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 2048
"""Tokens of one message to the scoring stage: other stages of its daemon wait for so many."""
MIN_WINDOW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ScorerSizing:
    """A scoring model on ``target``, whole but for its output matrix."""

    spec: ModelSpec
    target: TargetDevice
    window_tokens: int
    step_tokens: int
    use: MemoryUse

    @property
    def layers(self) -> LayerRange:
        return LayerRange(0, self.spec.n_layers)


def scorer_inputs(
    config: Config,
    scorer: ModelSpec | None,
    targets: Sequence[TargetDevice],
    inventory: Inventory | None,
    dtypes: tuple[Dtype, Dtype],
) -> ScorerSizing | None:
    """Place the scoring model where ``pflash.device`` says, else beside the last layers.

    ``dtypes``: of activations and of keys and values, those of the served model.  Raises PlacementError for a device
    that does not exist and a model that cannot score.
    """
    if scorer is None:
        return None
    device, file = config.pflash.device, str(config.file)
    target = targets[-1]
    if device is not None:
        backend = Backend(config.groups[device.group].backend)
        target = TargetDevice(device, backend, find_device(config, "pflash.device", device, backend, inventory))
    if Space.FULL not in scorer.spaces():
        why = "is a model none of whose layers attends to all positions: it cannot score"
        raise PlacementError("pflash.path", config.pflash.path, why, "name another model", file=file)
    window_tokens = min(config.pflash.window, scorer.context_tokens)
    if window_tokens < MIN_WINDOW_TOKENS:
        why = f"has a context of {window_tokens} tokens; a window takes {MIN_WINDOW_TOKENS}"
        raise PlacementError("pflash.path", config.pflash.path, why, "name another model", file=file)
    step_tokens = min(window_tokens, CPU_STEP_TOKENS if target.backend is Backend.CPU else GPU_STEP_TOKENS)
    shard = Shard(target.device, target.backend, LayerRange(0, scorer.n_layers), first=True, last=False)
    pools, cost = score_pools(scorer.spaces(), window_tokens), CostModel(scorer, *dtypes)
    use = MemoryUse(
        weight_bytes=cost.weight_bytes(shard),
        state_bytes=cost.state_bytes(shard, pools),
        workspace_bytes=cost.workspace_bytes(shard, StepSizes(step_tokens, 1, window_tokens, window_tokens, 1, pools)),
    )
    return ScorerSizing(scorer, target, window_tokens, step_tokens, use)


def placed_scorer(scorer: ScorerSizing | None) -> PlacedScorer | None:
    """Return the scoring stage of a placement."""
    if scorer is None:
        return None
    target = scorer.target
    return PlacedScorer(target.device, target.backend, scorer.spec.name, scorer.window_tokens, scorer.step_tokens)
