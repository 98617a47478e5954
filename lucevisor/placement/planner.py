"""Placement planner: which device holds which layers, from a model, a configuration and an inventory of devices.

Pure: the caller reads the model's header and queries the devices.  Invariant: a Placement covers every layer once, in
the order of ``target_devices``, and fits wherever the free memory is known; otherwise the result is an Infeasible with
advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lucevisor.config import Auto, Config, Ranges, RecoveryConfig, Split, WeightedSplit
from lucevisor.model.drafters import DraftSpec
from lucevisor.model.pages import max_resident_chunk, pages_of, pool_pages
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Dtype, LayerRange, Space, dtype_bytes
from lucevisor.placement.advice import advise
from lucevisor.placement.auto_split import AutoSplit, automatic
from lucevisor.placement.chunks import choose_chunk
from lucevisor.placement.cost import MemoryUse
from lucevisor.placement.devices import Inventory, Memory, TargetDevice, memories_of, target_devices
from lucevisor.placement.drafting import (
    DrafterSizing,
    choose_drafting,
    draft_inputs,
    draft_stage,
    left_out,
    too_dear,
)
from lucevisor.placement.dtypes import choose_dtype, choose_kv_dtype
from lucevisor.placement.flash_pool import choose_pool
from lucevisor.placement.ranges import BoundaryMove, SplitError, from_ranges, from_weights, snap_to_legal
from lucevisor.placement.reasons import Decisions, details_of, notices_of, reasons_of
from lucevisor.placement.result import DevicePlan, DraftPolicy, Infeasible, Placement, PlacementError
from lucevisor.placement.scoring import ScorerSizing, placed_scorer, scorer_inputs
from lucevisor.placement.sizer import SizingInputs
from lucevisor.placement.sizing import Sizing, compute_sizes, reserved_slots
from lucevisor.placement.speeds import SpeedModel, Speeds
from lucevisor.placement.stages import arenas_of, stages_of
from lucevisor.protocol.loading import PoolSizes

SPLIT_KEY = "placement.target_layer_split"
DEVICES_KEY = "placement.target_devices"


def plan(
    spec: ModelSpec,
    config: Config,
    inventory: Inventory | None = None,
    speeds: Speeds | None = None,
    drafter: DraftSpec | None = None,
    scorer: ModelSpec | None = None,
) -> Placement | Infeasible:
    """Place ``spec``, its ``drafter`` and the ``scorer`` of PFlash, if there are any, on the devices of ``config``.

    ``spec.files`` must be set.  ``inventory``: the devices that each group's daemon or probe reported.  Free memory is
    unknown for groups that are missing from it: whether they fit is then not checked, and automatic sizes stay small.
    ``speeds``: measured times of this model on these devices, from which an automatic split is chosen; None: it is
    chosen by memory.  A drafter is left out if ``draft.kind`` is automatic and it leaves too little for the model.
    Raises PlacementError (a ConfigError) for invalid settings: a split that does not match the layers, a device that
    does not exist, fewer pages than the context needs.
    """
    targets = target_devices(config, inventory)
    draft = draft_inputs(config, drafter, targets, inventory)
    dtype = choose_dtype(config.engine.dtype, targets)
    kv_dtype = choose_kv_dtype(config.engine.kv_dtype, dtype.dtype)
    scoring = scorer_inputs(config, scorer, targets, inventory, (dtype.dtype, kv_dtype.dtype))
    with_drafter = _plan(spec, config, targets, speeds, draft, scoring)
    if draft is None or config.draft.kind != "auto":
        return with_drafter
    without = _plan(spec, config, targets, speeds, None, scoring)
    reason = too_dear(with_drafter, without)
    return left_out(without, draft, reason) if reason else with_drafter


def _plan(
    spec: ModelSpec,
    config: Config,
    targets: tuple[TargetDevice, ...],
    speeds: Speeds | None,
    draft: DrafterSizing | None,
    scoring: ScorerSizing | None,
) -> Placement | Infeasible:
    dtype = choose_dtype(config.engine.dtype, targets)
    kv_dtype = choose_kv_dtype(config.engine.kv_dtype, dtype.dtype)
    drafting = choose_drafting(config, draft)
    inputs = sizing_inputs(spec, config, targets, dtype.dtype, kv_dtype.dtype, draft, drafting)
    inputs = replace(inputs, scorer=scoring)
    auto, ranges, moves = split_layers(inputs, config.placement.split, config, speeds)
    inputs, sizing = _sized(inputs, ranges, config)
    decisions = Decisions(config, inputs, sizing, (dtype, kv_dtype), moves, drafting, auto)
    placement = replace(
        timed(build_placement(inputs, sizing, drafting, config.recovery, config.kvflash.tau), auto),
        swap_bytes=config.engine.swap_space if config.cache.prefix_slots else 0,
        options=model_options(config),
        reasons=reasons_of(decisions),
        details=tuple(details_of(decisions)),
        notices=notices_of(decisions),
    )
    if sizing.fits:
        return placement
    return Infeasible(placement, sizing.shortages, advise(inputs, ranges, sizing))


def _sized(inputs: SizingInputs, ranges: Sequence[LayerRange], config: Config) -> tuple[SizingInputs, Sizing]:
    """Choose what is automatic of the prefill chunk and of the pool of KV Flash, and return the sizes."""
    auto_pool = inputs.pool_pages is not None and config.kvflash.pool_tokens == "auto"
    if auto_pool:
        inputs = choose_pool(inputs, ranges, config.engine.least_chunk)
    if config.engine.prefill_chunk == "auto":
        inputs, sizing = choose_chunk(inputs, ranges)
        if not auto_pool:
            return inputs, sizing
        inputs = choose_pool(inputs, ranges, inputs.prefill_chunk)  # a longer one takes memory
    return inputs, compute_sizes(inputs, ranges)


def model_options(config: Config) -> dict[str, str]:
    """Return the options of the model's family, for ``open_spec`` and ``Load.options``."""
    return {} if config.model.yarn_attn_factor == "default" else {"yarn_attn_factor": config.model.yarn_attn_factor}


def split_layers(
    inputs: SizingInputs, split: Split, config: Config, speeds: Speeds | None
) -> tuple[AutoSplit | None, tuple[LayerRange, ...], tuple[BoundaryMove, ...]]:
    """Turn the configured split into layer ranges that the model allows.  Raises PlacementError."""
    n_layers = inputs.spec.n_layers
    try:
        if isinstance(split, Auto):
            speed_model = None if speeds is None else SpeedModel.of(inputs.spec, speeds)
            auto = automatic(inputs, speed_model, config.placement.goal)
            return auto, auto.ranges, ()
        return None, *snap_to_legal(_ranges_of(split, n_layers), inputs.spec.legal_boundary)
    except SplitError as error:
        raise _refused(error, config) from None


def _ranges_of(split: WeightedSplit | Ranges, n_layers: int) -> tuple[LayerRange, ...]:
    return from_ranges(split.values, n_layers) if isinstance(split, Ranges) else from_weights(split.values, n_layers)


def _refused(error: SplitError, config: Config) -> PlacementError:
    if error.of_devices:
        key, value = DEVICES_KEY, [str(device) for device in config.placement.devices]
        return PlacementError(key, value, error.why, error.hint, file=str(config.file))
    return PlacementError(SPLIT_KEY, config.placement.split_text(), error.why, error.hint, file=str(config.file))


def journal_bytes(spec: ModelSpec, dtype: Dtype, n_stages: int, pools: PoolSizes, recovery: RecoveryConfig) -> int:
    """Return the most host memory that the journal takes: rows of every page at every boundary, within its limit."""
    if not recovery.hold_s:
        return 0
    page_bytes = PAGE_TOKENS * dtype_bytes(dtype, spec.boundary_width)
    return min(recovery.journal // page_bytes, (n_stages - 1) * pools.full_pages) * page_bytes


def build_placement(
    inputs: SizingInputs,
    sizing: Sizing,
    drafting: DraftPolicy,
    recovery: RecoveryConfig,
    tau: int,
) -> Placement:
    """Build a placement from its sizes, without reasons."""
    spec = inputs.spec
    stages = stages_of(sizing.shards)
    draft = draft_stage(inputs.draft, len(stages))
    return Placement(
        model=spec.name,
        architecture=spec.architecture,
        quant=spec.quant,
        n_layers=spec.n_layers,
        dtype=inputs.dtype,
        kv_dtype=inputs.kv_dtype,
        max_context=sizing.max_context,
        max_sequences=inputs.max_sequences,
        prefill_chunk=sizing.prefill_chunk,
        pool_pages=inputs.pool_pages,
        residency_policy=inputs.residency_policy,
        tau=tau,
        max_step_tokens=sizing.max_step_tokens,
        pools=sizing.pools,
        spaces=spec.spaces(),
        window_tokens=spec.window if Space.WINDOW in spec.spaces() else None,
        devices=_device_plans(inputs.targets, sizing),
        stages=stages,
        arenas=arenas_of(
            stages,
            sizing.max_step_tokens,
            spec.boundary_width,
            spec.hidden_size,
            inputs.dtype,
            draft,
            max_sequences=inputs.max_sequences,
            max_drafts=sizing.max_drafts,
        ),
        journal_bytes=journal_bytes(spec, inputs.dtype, len(stages), sizing.pools, recovery),
        draft=draft,
        draft_device=_draft_device(inputs, sizing),
        drafting=replace(drafting, max_drafts=sizing.max_drafts),
        scorer=placed_scorer(inputs.scorer),
        scorer_device=_scorer_device(inputs, sizing),
    )


def timed(placement: Placement, auto: AutoSplit | None) -> Placement:
    """Add the times from which an automatic split was chosen."""
    if auto is None or auto.speed_model is None or auto.found is None:
        return placement
    times = [auto.speed_model.seconds(i, device.layers) for i, device in enumerate(placement.devices)]
    devices = tuple(
        replace(device, decode_s=decode_s, prefill_s=prefill_s)
        for device, (decode_s, prefill_s) in zip(placement.devices, times, strict=True)
    )
    return replace(placement, devices=devices, goal=auto.goal, measured=auto.speed_model.speeds.measured)


def _device_plans(targets: Sequence[TargetDevice], sizing: Sizing) -> tuple[DevicePlan, ...]:
    memories = memories_of(targets)
    return tuple(
        _device_plan(target, shard.layers, use, memories[target.memory], sizing)
        for target, shard, use in zip(targets, sizing.shards, sizing.uses, strict=True)
    )


def _draft_device(inputs: SizingInputs, sizing: Sizing) -> DevicePlan | None:
    if inputs.draft is None or sizing.draft_use is None:
        return None
    target = inputs.draft.target
    memory = memories_of(inputs.all_targets)[target.memory]
    return _device_plan(target, inputs.draft.spec.layers, sizing.draft_use, memory, sizing)


def _scorer_device(inputs: SizingInputs, sizing: Sizing) -> DevicePlan | None:
    scorer = inputs.scorer
    if scorer is None:
        return None
    memory = memories_of(inputs.all_targets)[scorer.target.memory]
    return _device_plan(scorer.target, scorer.layers, scorer.use, memory, sizing)


def _device_plan(
    target: TargetDevice, layers: LayerRange, use: MemoryUse, memory: Memory, sizing: Sizing
) -> DevicePlan:
    short = {shortage.memory: shortage.short_bytes for shortage in sizing.shortages}
    return DevicePlan(
        device=target.device,
        backend=target.backend,
        name=target.info.name if target.info is not None else "",
        memory=target.memory,
        layers=layers,
        weight_bytes=use.weight_bytes,
        state_bytes=use.state_bytes,
        workspace_bytes=use.workspace_bytes,
        free_bytes=memory.free_bytes,
        reserve_bytes=memory.reserve_bytes,
        short_bytes=short.get(target.memory, 0),
        host_state_bytes=use.host_state_bytes,
    )


def sizing_inputs(
    spec: ModelSpec,
    config: Config,
    targets: tuple[TargetDevice, ...],
    dtype: Dtype,
    kv_dtype: Dtype,
    draft: DrafterSizing | None,
    drafting: DraftPolicy,
) -> SizingInputs:
    """Read the engine section.  Raises PlacementError where two of its keys contradict each other."""
    engine, file = config.engine, str(config.file)
    max_context = None if engine.max_context == "auto" else engine.max_context
    pages = None if engine.pages == "auto" else engine.pages
    if max_context is not None and max_context < 2:
        why = "leaves no room for an answer: one prompt token and one generated token need 2"
        raise PlacementError("engine.max_context", max_context, why, "nearest: 2", file=file)
    paged, flash_tokens, chunk = Space.FULL in spec.spaces(), config.kvflash.pool_tokens, engine.least_chunk
    pool = None
    if paged and flash_tokens:
        pool = pool_pages(0 if flash_tokens == "auto" else flash_tokens)  # the least until ranges are known
    if paged and pages is not None and max_context is not None:
        least = pages_of(max_context) if pool is None else min(pool, pages_of(max_context))
        if pages < least:
            of = f"engine.max_context = {max_context}" if pool is None else "kvflash.pool_tokens of one sequence"
            smaller = f", or engine.max_context = {pages * PAGE_TOKENS}" if pool is None else ""
            why = f"hold {pages * PAGE_TOKENS} tokens, less than {of}"
            raise PlacementError("engine.pages", pages, why, f"nearest: {least}{smaller}", file=file)
    n_slots, n_slot_pages = reserved_slots(
        spec, kv_dtype, config.cache.prefix_slots, config.cache.memory, None if draft is None else draft.spec.model
    )
    return SizingInputs(
        spec=spec,
        targets=targets,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_sequences=engine.max_sequences,
        prefill_chunk=chunk if pool is None else min(chunk, max_resident_chunk(pool)),
        max_context=max_context,
        pages=pages,
        n_slots=n_slots,
        n_slot_pages=n_slot_pages,
        states_in_host=config.cache.states == "host" and n_slots > 0,
        pool_pages=pool,
        residency_policy=config.kvflash.policy,
        host_bytes=config.kvflash.host if pool is not None and config.kvflash.policy != "lru" else 0,
        draft=draft,
        max_drafts=drafting.max_drafts,
    )
