"""Placement planner: which device holds which layers (llama.cpp's tensor split, layer mode; vLLM's pipeline parallel).

Pure.  A layer is never split over devices.  Each choice records its reason where it is made.  Invariant: a Placement
covers every layer once, in the order of ``target_devices``, and fits wherever the free memory is known; else the result
is an Infeasible with advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, isfinite
from typing import TypeGuard

from lucevisor.config import Auto, Config, Ranges, RecoveryConfig
from lucevisor.config.sections import Goal
from lucevisor.model.drafters import DraftSpec
from lucevisor.model.pages import HEAD_PAGES, MIN_POOL_PAGES, TAIL_PAGES, max_resident_chunk, pages_of, pool_pages
from lucevisor.model.spec import LAST_ROW, ModelSpec, Pooling
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange, dtype_bytes
from lucevisor.model.vision import VisionSpec
from lucevisor.placement.cost import MemoryUse
from lucevisor.placement.devices import (
    HOST,
    DtypeChoice,
    Inventory,
    TargetDevice,
    choose_dtype,
    choose_kv_dtype,
    memories_of,
    order_is_free,
    target_devices,
)
from lucevisor.placement.extra_models import (
    REFERENCE_TOKENS,
    DrafterSizing,
    ExtraSizing,
    choose_drafting,
    left_out_reason,
    place_drafter,
    place_encoder,
    place_scorer,
    without_drafter,
)
from lucevisor.placement.formatting import format_bytes, format_seconds
from lucevisor.placement.links import SUPERVISOR, Links, Order, Traffic, best_order
from lucevisor.placement.result import (
    DevicePlan,
    Infeasible,
    PlacedEncoder,
    PlacedScorer,
    Placement,
    PlacementError,
)
from lucevisor.placement.sizing import (
    MAX_AUTO_POOL_PAGES,
    RangeMemory,
    Sizing,
    SizingInputs,
    choose_chunk,
    choose_pool,
    compute_sizes,
    largest_fitting,
    ranges_by_memory,
    reference_load,
    reserved_slots,
)
from lucevisor.placement.speeds import ANSWER_TOKENS, PROMPT_TOKENS, SpeedModel, Speeds
from lucevisor.placement.split import (
    SLACK,
    Partition,
    PartitionProblem,
    RangeCost,
    SplitError,
    fastest_partition,
    from_ranges,
    from_weights,
    legal_boundaries,
    snap_to_legal,
)
from lucevisor.placement.stages import arenas_of, stages_of
from lucevisor.protocol.loading import SpeculationSettings

_REQUEST = f"{PROMPT_TOKENS} prompt tokens and {ANSWER_TOKENS} generated tokens"
LEFT_OUT_GAIN = 0.25
"""Share of the time that a host must save by being left out: with less, its memory is worth more.  The supervisor's
must save twice that, as without it another host can be lost, and snapshots cross a network.
"""
DEVICES_KEY, SPLIT_KEY = "placement.target_devices", "placement.target_layer_split"
MIN_CHUNK = 64  # the smallest prefill chunk that advice names
FEW_SLOTS = 32
"""Automatic prefix slots on a cpu, and where free memory is unknown."""
ALL_BYTES = 1 << 62
"""Automatic memory of prefix slots on GPUs where pages and recurrent states share it: what running requests leave."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sequences that run at once, prefix slots, and their memory."""

    max_sequences: int
    prefix_slots: int
    cache_bytes: int

    @classmethod
    def configured(cls, config: Config, auto_slots: int, pooling: Pooling = LAST_ROW) -> Capacity:
        n, slots, n_bytes = config.engine.max_sequences, config.cache.prefix_slots, config.cache.memory
        if not pooling.generates:
            slots = 0
        return cls(
            (8 if pooling.generates else 32) if n == "auto" else n,  # a text that is pooled takes one step
            auto_slots if slots == "auto" else slots,
            1 << 30 if n_bytes == "auto" else n_bytes,
        )


def plan(
    spec: ModelSpec,
    config: Config,
    inventory: Inventory | None = None,
    speeds: Speeds | None = None,
    drafter: DraftSpec | None = None,
    scorer: ModelSpec | None = None,
    links: Links | None = None,
    encoder: VisionSpec | None = None,
) -> Placement | Infeasible:
    """Place ``spec``, its ``drafter``, the ``scorer`` of PFlash and the vision ``encoder`` on the devices of
    ``config``.

    ``inventory``: devices that were reported; for groups that are missing free memory is unknown, nothing is checked,
    and automatic sizes stay small.  ``speeds``: measured times, for an automatic split; None: it is chosen by memory.
    ``links``: to other hosts; with automatic ``target_devices`` they decide on the order of hosts, and one that makes
    requests slower is left out if the others have room.  An automatic drafter is left out if it leaves too little for
    the model.  A model that is loaded on demand gets the smallest of a few shares of the memory in which a usual
    context fits. Raises PlacementError (a ConfigError) for invalid settings.
    """
    case = _Case(spec, inventory, drafter, scorer, links or Links(), encoder)
    speed_model = None if speeds is None else SpeedModel.of(spec, speeds)
    if not config.model.preload and config.model.memory_share == "auto" and len(config.neighbours) > 1:
        for share in (1 / 8, 1 / 4, 1 / 2):
            result = case.place(replace(config, model=replace(config.model, memory_share=share)), speed_model)
            wanted = min(REFERENCE_TOKENS, spec.context_tokens)
            if isinstance(result, Placement) and not result.draft_left_out and result.max_context >= wanted:
                why = f"memory_share {share:g}: it is loaded on demand, and a context of {wanted} tokens fits"
                return replace(result, reasons=(*result.reasons, why))
    return case.place(config, speed_model)


@dataclass(frozen=True, slots=True)
class _Case:
    """What is to be placed; see :func:`plan`."""

    spec: ModelSpec
    inventory: Inventory | None
    drafter: DraftSpec | None
    scorer: ModelSpec | None
    links: Links
    encoder: VisionSpec | None

    def place(self, config: Config, speed_model: SpeedModel | None) -> Placement | Infeasible:
        if order_is_free(config, target_devices(config, self.inventory)):
            return self.plan_hosts(config, speed_model)
        return self.plan(config, speed_model)

    def plan(self, config: Config, speed_model: SpeedModel | None) -> Placement | Infeasible:
        attempt = self._attempt(config, speed_model)
        draft, known = attempt.draft, _are_known_gpus(attempt.targets)

        def place(config: Config, capacity: Capacity) -> Placement | Infeasible:
            def place_with(draft: DrafterSizing | None) -> Placement | Infeasible:
                return replace(attempt, config=config, draft=draft, capacity=capacity, reasons=[], notices=[]).plan()

            with_drafter = place_with(draft)
            if draft is None or config.draft.kind != "auto":
                return with_drafter
            without = place_with(None)
            reason = left_out_reason(with_drafter, without)
            return without_drafter(without, draft, reason) if reason else with_drafter

        capacity = attempt.capacity
        small = place(config, capacity)
        if isinstance(small, Infeasible) or not known:
            return small
        chunked = replace(config, engine=replace(config.engine, prefill_chunk=small.prefill_chunk))
        best = _with_largest_capacity(chunked, capacity, small, lambda capacity: place(chunked, capacity))
        if best is small:
            return small
        why = (
            f"max_sequences {best.max_sequences}, prefix slots {best.prefix_slots} of {format_bytes(best.cache_bytes)}"
        )
        return replace(
            best, reasons=(*best.reasons, why + ": as many as leave the context and half of the pages, if automatic")
        )

    def _attempt(self, config: Config, speed_model: SpeedModel | None) -> _PlanAttempt:
        targets = target_devices(config, self.inventory)
        dtype = choose_dtype(config.engine.dtype, targets)
        if config.engine.deterministic:
            _check_deterministic(config, targets, dtype.dtype)
        kv_dtype = choose_kv_dtype(config.engine.kv_dtype, dtype.dtype)
        draft = place_drafter(config, self.drafter, targets, self.inventory)
        scoring = place_scorer(config, self.scorer, targets, self.inventory, (dtype.dtype, kv_dtype.dtype))
        extras = scoring, place_encoder(config, self.encoder, self.spec, targets, self.inventory, dtype.dtype)
        slots = 512 if _are_known_gpus(targets) else FEW_SLOTS
        capacity = Capacity.configured(config, slots, self.spec.pooling)
        dtypes = dtype, kv_dtype
        return _PlanAttempt(self.spec, config, targets, dtypes, speed_model, draft, extras, capacity, self.links)

    # ---- several hosts

    def plan_hosts(self, config: Config, speed_model: SpeedModel | None) -> Placement | Infeasible:
        """Place the model on hosts in the best order, without those that only make it slower."""
        targets = target_devices(config, self.inventory)

        def on(order: Order) -> tuple[Config, SpeedModel | None]:
            """Return the configuration with the devices of the hosts in an order, and their speeds."""
            chosen = [i for host in order for i, target in enumerate(targets) if target.host == host]
            devices = tuple(config.placement.devices[i] for i in chosen)
            model = None if speed_model is None else replace(speed_model, order=tuple(chosen))
            return replace(config, placement=replace(config.placement, devices=devices)), model

        def seconds(order: Order) -> tuple[float, float]:
            """Return the time of a request, infinite if no split by speed has room, and that on the way alone."""
            attempt = self._attempt(*on(order))
            return attempt.fastest_s(), sum(attempt.ways_s())

        def score(order: Order) -> tuple[float, float]:
            total_s, ways_s = seconds(order)
            n_out = sum(2 if host == SUPERVISOR else 1 for host in configured if host not in order)
            return total_s * (1 + LEFT_OUT_GAIN * n_out), ways_s

        configured: Order = tuple(dict.fromkeys(target.host for target in targets))
        together = best_order(configured, score, drop=False)
        if not _much_less(seconds(together), seconds(configured)):
            together = configured
        result = _noted(self.plan(*on(together)), _order_reason(together, seconds(together), seconds(configured)))
        if not isfinite(score(together)[0]) or speed_model is None:
            return result
        few = best_order(together, score, drop=True)
        out = [host for host in configured if host not in few]
        if not out:
            return result
        smaller, whole = self.plan(*on(few)), result.placement if isinstance(result, Infeasible) else result
        if isinstance(smaller, Infeasible) or smaller.max_context < whole.max_context:
            return result
        why = _left_out_reason(out, few, seconds(few)[0], seconds(together)[0])
        return replace(smaller, reasons=(why, *smaller.reasons), hosts_left_out=why)


def _noted(result: Placement | Infeasible, reason: str) -> Placement | Infeasible:
    if isinstance(result, Infeasible):
        return replace(result, placement=replace(result.placement, reasons=(reason, *result.placement.reasons)))
    return replace(result, reasons=(reason, *result.reasons))


def _much_less(taken: tuple[float, float], before: tuple[float, float]) -> bool:
    """Return whether an order is faster by more than measurements differ."""
    (total_s, ways_s), (before_s, ways_before_s) = taken, before
    if total_s == before_s:  # without speeds, or with no room: by the ways alone
        return ways_s * (1 + SLACK) < ways_before_s
    return total_s * (1 + SLACK) < before_s


def _order_reason(chosen: Order, taken: tuple[float, float], configured: tuple[float, float]) -> str:
    what = f"hosts: {_hosts(chosen)}, in this order"
    (total_s, ways_s), (before_s, ways_before_s) = taken, configured
    if (total_s, ways_s) == (before_s, ways_before_s):
        return f"{what}, which is that of the configuration: no other is {SLACK:.0%} faster"
    if isfinite(before_s) and before_s > 0:
        times = format_seconds(total_s), format_seconds(before_s)
    else:
        times = f"{format_seconds(ways_s)} on the links", format_seconds(ways_before_s)
    return f"{what}: {_REQUEST} take {times[0]}, and {times[1]} in the order of the configuration"


def _left_out_reason(out: Sequence[str], left: Sequence[str], seconds: float, with_all_s: float) -> str:
    times = f"{format_seconds(with_all_s)} with {_hosts(out)}, {format_seconds(seconds)} on {_hosts(left)} alone"
    return f"hosts: {_REQUEST} take {times}"


def _hosts(names: Iterable[str]) -> str:
    return ", ".join(name or "this one" for name in names)


def _are_known_gpus(targets: Sequence[TargetDevice]) -> bool:
    return all(target.info is not None and target.backend is not Backend.CPU for target in targets)


def _check_deterministic(config: Config, targets: Sequence[TargetDevice], dtype: Dtype) -> None:
    """Raise PlacementError where ``engine.deterministic`` cannot hold."""
    kinds = {(t.backend, "" if t.info is None else t.info.architecture) for t in targets}
    why = hint = ""
    if len({backend for backend, _ in kinds}) > 1 or len({kind for _, kind in kinds if kind}) > 1:
        names = ", ".join(f"{t.device} is {t.backend if t.info is None else t.info.architecture}" for t in targets)
        why = f"needs devices of one kind, as each kind rounds otherwise: {names}"
        hint = "name devices of one kind in placement.target_devices"
    elif dtype is not Dtype.BFLOAT16 and any(target.backend is Backend.CPU for target in targets):
        why = f"has no kernels for {dtype} on a cpu"
        hint = "set engine.dtype = bfloat16"
    if why:
        hint = f"{hint}; nearest: engine.deterministic = false"
        raise PlacementError("engine.deterministic", True, why, hint, file=str(config.file))


def _with_largest_capacity(
    config: Config, capacity: Capacity, small: Placement, planned: Callable[[Capacity], Placement | Infeasible]
) -> Placement:
    """Return the placement of the largest automatic capacity that leaves context and drafter as in ``small``."""

    def as_good(found: Placement | Infeasible) -> TypeGuard[Placement]:
        return (
            isinstance(found, Placement)
            # Where pages and states share memory, states need some of their own.
            and found.max_context >= small.max_context * (0.95 if found.pools.state_pages else 1)
            and found.pool_pages == small.pool_pages
            and (found.draft is None) == (small.draft is None)
        )

    best = small
    for n in (128, 64, 32, 16) if config.engine.max_sequences == "auto" else ():
        found = planned(replace(capacity, max_sequences=n))
        if as_good(found) and 2 * _state_bytes(found) >= _state_bytes(small):
            best, capacity = found, replace(capacity, max_sequences=n)
            break
    if config.cache.memory == "auto" and capacity.prefix_slots:
        n_bytes = ALL_BYTES if best.pools.state_pages else _state_bytes(best) // 2
        while n_bytes > capacity.cache_bytes:
            found = planned(replace(capacity, cache_bytes=n_bytes))
            if as_good(found):
                return found
            n_bytes = min(n_bytes, _state_bytes(best)) // 2
    return best


def _state_bytes(placement: Placement) -> int:
    return sum(device.state_bytes for device in placement.devices)


def model_options(config: Config) -> dict[str, str]:
    """Return the options of the model's family, for ``open_spec`` and ``Load.options``."""
    return {} if config.model.yarn_attn_factor == "default" else {"yarn_attn_factor": config.model.yarn_attn_factor}


@dataclass(frozen=True, slots=True)
class _PlanAttempt:
    """One model on given devices, with or without its drafter."""

    spec: ModelSpec
    config: Config
    targets: tuple[TargetDevice, ...]
    dtypes: tuple[DtypeChoice, DtypeChoice]
    speed_model: SpeedModel | None
    draft: DrafterSizing | None
    extras: tuple[ExtraSizing[PlacedScorer] | None, ExtraSizing[PlacedEncoder] | None]
    capacity: Capacity
    links: Links
    reasons: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def plan(self) -> Placement | Infeasible:
        config = self.config
        for choice in self.dtypes:
            self.reasons.append(choice.reason)
            self.notices.extend(choice.notices)
        if DEVICES_KEY not in config.set_keys:
            self.reasons.append(f"devices: all of all groups, as {DEVICES_KEY} names none")
        drafting = self._drafting()
        inputs = self._inputs(drafting)
        ranges, partition = self._split(inputs)
        self.reasons.extend(self._boundaries())
        sizing = _choose_sizes(inputs, ranges, config)
        reasons = [
            *_kv_saving(sizing.inputs),
            *_drafts(config, sizing, drafting),
            *_extra_models(config, sizing.inputs),
            *sizing.reasons,
            *_residency(config, sizing),
            *_weights(sizing),
            *_memories(sizing),
        ]
        self.reasons.extend(reasons)
        notices = [*_unused(config, sizing), *_reduced(config, sizing, drafting)]
        self.notices.extend(notices)
        placement = self._placement(sizing, partition, drafting)
        return placement if sizing.fits else Infeasible(placement, sizing.shortages, advise(sizing, ranges))

    def fastest_s(self) -> float:
        """Return the time that the split by speed minimises; infinity: none fits, 0: no speeds."""
        if self.speed_model is None:
            return 0.0
        try:
            partition = self._fastest(self._inputs(self._drafting()), self.speed_model)
        except SplitError:
            return inf
        return inf if partition is None else partition.best_s

    def ways_s(self) -> tuple[float, ...]:
        drafter = None if self.draft is None else self.draft.target.host
        return self._traffic().ways_s(self.links, [target.host for target in self.targets], drafter)

    def _traffic(self) -> Traffic:
        chunk = PROMPT_TOKENS if self.speed_model is None else self.speed_model.speeds.conditions.n_rows
        row_bytes = dtype_bytes(self.dtypes[0].dtype, self.spec.boundary_width)
        return Traffic(PROMPT_TOKENS, chunk, ANSWER_TOKENS, row_bytes)

    def _drafting(self) -> SpeculationSettings:
        few = Capacity.configured(self.config, FEW_SLOTS)
        return choose_drafting(self.config, self.spec, self.draft, few.max_sequences)

    def _inputs(self, drafting: SpeculationSettings) -> SizingInputs:
        """Read the engine section.  Raises PlacementError where two of its keys contradict each other."""
        config, engine, spec, file = self.config, self.config.engine, self.spec, str(self.config.file)
        max_context = None if engine.max_context == "auto" else engine.max_context
        pages = None if engine.pages == "auto" else engine.pages
        if max_context is not None and max_context < 2:
            why = "leaves no room for an answer: one prompt token and one generated token need 2"
            raise PlacementError("engine.max_context", max_context, why, "nearest: 2", file=file)
        paged, flash_tokens, chunk = KvGroup.FULL in spec.kv_groups(), config.kvflash.pool_tokens, engine.usual_chunk
        if spec.pooling.whole_texts:
            if max_context is not None and max_context > spec.context_tokens:
                why = f"is more than the {spec.context_tokens} positions that {spec.name} was trained with"
                raise PlacementError(
                    "engine.max_context", max_context, why, f"nearest: {spec.context_tokens}", file=file
                )
            chunk = max(chunk, max_context or spec.context_tokens)
            if engine.deterministic:
                why, hint = f"has no kernels for the whole texts of {spec.name}", "nearest: false"
                raise PlacementError("engine.deterministic", True, why, hint, file=file)
            if flash_tokens:
                why = f"drops keys of a text that {spec.name} computes whole"
                raise PlacementError("kvflash.pool_tokens", flash_tokens, why, "nearest: 0", file=file)
        pool = None
        if paged and flash_tokens:
            pool = pool_pages(0 if flash_tokens == "auto" else flash_tokens)  # the smallest until ranges are known
        if paged and pages is not None and max_context is not None:
            needed = pages_of(max_context) if pool is None else min(pool, pages_of(max_context))
            if pages < needed:
                of = f"engine.max_context = {max_context}" if pool is None else "kvflash.pool_tokens of one sequence"
                smaller = f", or engine.max_context = {pages * PAGE_TOKENS}" if pool is None else ""
                why = f"hold {pages * PAGE_TOKENS} tokens, less than {of}"
                raise PlacementError("engine.pages", pages, why, f"nearest: {needed}{smaller}", file=file)
        capacity, kv_dtype = self.capacity, self.dtypes[1].dtype
        drafter = None if self.draft is None else self.draft.spec.model
        n_slots, n_slot_pages = reserved_slots(spec, kv_dtype, capacity.prefix_slots, capacity.cache_bytes, drafter)
        return SizingInputs(
            spec=spec,
            targets=self.targets,
            dtype=self.dtypes[0].dtype,
            kv_dtype=kv_dtype,
            max_sequences=capacity.max_sequences,
            prefill_chunk=chunk if pool is None else min(chunk, max_resident_chunk(pool)),
            max_context=max_context,
            pages=pages,
            n_slots=n_slots,
            n_slot_pages=n_slot_pages,
            states_in_host=config.cache.states == "host" and n_slots > 0,
            pool_pages=pool,
            residency_policy=config.kvflash.policy,
            host_bytes=config.kvflash.host if pool is not None and config.kvflash.policy != "lru" else 0,
            draft=self.draft,
            drafting=drafting,
            scorer=self.extras[0],
            encoder=self.extras[1],
            one_memory=pool is None and _are_known_gpus(self.targets),
        )

    # ---- the split

    def _split(self, inputs: SizingInputs) -> tuple[tuple[LayerRange, ...], Partition | None]:
        """Return layer ranges that the model allows, and the partition if they are chosen by speed."""
        split, spec = self.config.placement.split, self.spec
        try:
            if isinstance(split, Auto):
                return self._automatic_split(inputs)
            if isinstance(split, Ranges):
                ranges, why = from_ranges(split.values, spec.n_layers), "ranges as configured"
            else:
                ranges = from_weights(split.values, spec.n_layers)
                weights = self.config.placement.split_text()
                why = f"{spec.n_layers} split by the weights {weights}, rounded cumulatively"
            ranges, moves = snap_to_legal(ranges, spec.legal_boundary)
        except SplitError as error:
            raise self._refused(error) from None
        self.reasons.append(f"layers: {why}")
        devices = [target.device for target in self.targets]
        self.notices.extend(
            f"{SPLIT_KEY}: the boundary between {devices[move.shard - 1]} and {devices[move.shard]} moved from layer "
            f"{move.wanted} to {move.chosen}, the nearest where no layers share state across the boundary"
            for move in moves
        )
        return ranges, None

    def _refused(self, error: SplitError) -> PlacementError:
        placement, file = self.config.placement, str(self.config.file)
        if error.of_devices:
            value = [str(device) for device in placement.devices]
            return PlacementError(DEVICES_KEY, value, error.why, error.hint, file=file)
        return PlacementError(SPLIT_KEY, placement.split_text(), error.why, error.hint, file=file)

    def _automatic_split(self, inputs: SizingInputs) -> tuple[tuple[LayerRange, ...], Partition | None]:
        goal, speed_model = self.config.placement.goal, self.speed_model
        if speed_model is None:
            why_not = "device speeds are unknown: the first start with this model measures them, as does plan --measure"
        else:
            partition = self._fastest(inputs, speed_model)
            measured = speed_model.speeds.measured
            if partition is not None:
                self.reasons.extend([_by_speed(goal, partition), *self._times(partition, speed_model)])
                return partition.ranges, partition
            room = f"no split leaves room for {reference_load(inputs)[0]} tokens"
            why_not = f"speeds were measured ({measured}) and not used: {room}"
        ranges, memories = ranges_by_memory(inputs), memories_of(inputs.targets).values()
        known = [f"{m.name} {format_bytes(m.usable_bytes)}" for m in memories if m.usable_bytes is not None]
        why = f"split so that the fullest device is least full; usable memory: {', '.join(known)}"
        if not known:
            why = "about equal bytes per device, as their free memory is unknown"
        self.reasons.append(f"layers: {why}")
        if len(self.targets) > 1:
            self.reasons.append(why_not)
        return ranges, None

    def _fastest(self, inputs: SizingInputs, speed_model: SpeedModel) -> Partition | None:
        """Return the fastest split that fits, or one nearly as fast where pages and states share memory."""
        goal, ways_s = self.config.placement.goal, self.ways_s()
        apart = replace(inputs, one_memory=False)
        found = fastest_partition(partition_problem(apart, speed_model, goal, apart.spec.legal_boundary, ways_s))
        if not (boundaries := inputs.even_boundaries()):
            return found
        even = fastest_partition(partition_problem(inputs, speed_model, goal, boundaries.__contains__, ways_s))
        if even is None or found is None:
            return even or found
        return even if even.seconds <= found.best_s * (1 + SLACK) else found

    def _boundaries(self) -> Iterator[str]:
        """Name what each boundary between two hosts costs."""
        traffic = self._traffic()
        for before, target in pairwise(self.targets):
            way = self.links.between(before.host, target.host)
            if way is not None:
                token_s, rows_s = (way.message_s(n * traffic.row_bytes) for n in (1, traffic.chunk))
                times = (
                    f"{format_seconds(token_s)} a token, {format_seconds(rows_s)} for {traffic.chunk} tokens at once"
                )
                yield f"{before.device} to {target.device}: {times} ({way})"

    def _times(self, partition: Partition, speed_model: SpeedModel) -> Iterator[str]:
        speeds = speed_model.speeds
        if len(self.targets) == 1:
            return
        for i, (target, layers) in enumerate(zip(self.targets, partition.ranges, strict=True)):
            decode_s, prefill_s = speed_model.seconds(i, layers)
            n, n_rows = len(layers), speeds.conditions.n_rows
            what = "1 layer takes" if n == 1 else f"{n} layers take"
            times = f"{format_seconds(decode_s)} per token, {format_seconds(prefill_s)} for {n_rows} tokens at once"
            yield f"{target.device}: {what} {times}"
        yield f"speeds were measured {speeds.measured}; plan --measure repeats it"

    # ---- the placement

    def _placement(self, sizing: Sizing, partition: Partition | None, drafting: SpeculationSettings) -> Placement:
        spec, config, inputs = self.spec, self.config, sizing.inputs
        stages = stages_of(sizing.shards)
        draft = None if inputs.draft is None else inputs.draft.placed(len(stages))
        by_speed = self.speed_model if partition is not None else None
        devices = []
        for i, (target, shard, use) in enumerate(zip(inputs.targets, sizing.shards, sizing.uses, strict=True)):
            decode_s, prefill_s = (None, None) if by_speed is None else by_speed.seconds(i, shard.layers)
            device = _device_plan(sizing, target, shard.layers, use)
            devices.append(replace(device, decode_s=decode_s, prefill_s=prefill_s))
        draft_device = scorer_device = encoder_device = None
        if inputs.draft is not None and sizing.draft_use is not None:
            draft_device = _device_plan(sizing, inputs.draft.target, inputs.draft.spec.layers, sizing.draft_use)
        n_state_bytes = sum(one.state_bytes for one in (*devices, draft_device) if one is not None)
        if (scorer := inputs.scorer) is not None:
            scorer_device = _device_plan(sizing, scorer.target, LayerRange(0, scorer.n_layers), scorer.use)
        if (encoder := inputs.encoder) is not None:
            encoder_device = _device_plan(sizing, encoder.target, LayerRange(0, encoder.n_layers), encoder.use)
            n, most = min(sizing.prefill_chunk, sizing.max_context), encoder.placed.max_tokens
            if spec.whole_images and n < min(most, sizing.max_context):
                why = f"the model reads an image in one step, and the pool of KV Flash allows steps of {n} tokens"
                hint = f"nearest: {n}; or raise kvflash.pool_tokens"
                raise PlacementError("vision.max_tokens", most, why, hint, file=str(config.file))
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
            max_step_tokens=sizing.max_step_tokens,
            pools=sizing.pools,
            kv_groups=spec.kv_groups(),
            window_tokens=spec.window if KvGroup.WINDOW in spec.kv_groups() else None,
            devices=tuple(devices),
            stages=stages,
            arenas=arenas_of(
                stages,
                sizing.max_step_tokens,
                spec.boundary_width,
                spec.hidden_size,
                inputs.dtype,
                draft,
                max_sequences=inputs.max_sequences,
                max_drafts=sizing.drafting.max_drafts,
            ),
            journal_bytes=_journal_bytes(sizing, config.recovery),
            host_cache_bytes=_host_cache_bytes(config, self.targets),
            memory_shares={target.memory: _used_share(config, sizing, target) for target in inputs.all_targets},
            prefix_slots=self.capacity.prefix_slots,
            cache_bytes=self.capacity.cache_bytes if self.capacity.cache_bytes < ALL_BYTES else n_state_bytes,
            draft=draft,
            draft_device=draft_device,
            drafting=sizing.drafting,
            scorer=None if scorer is None else scorer.placed,
            scorer_device=scorer_device,
            encoder=None if encoder is None else encoder.placed,
            encoder_device=encoder_device,
            pool_pages=inputs.pool_pages,
            residency_policy=inputs.residency_policy,
            tau=config.kvflash.tau,
            deterministic=config.engine.deterministic,
            options=model_options(config),
            reasons=tuple(self.reasons),
            notices=tuple(self.notices),
            goal=config.placement.goal if by_speed is not None else "",
            measured=by_speed.speeds.measured if by_speed is not None else "",
        )


def _used_share(config: Config, sizing: Sizing, target: TargetDevice) -> float:
    """Return the share of a memory that the model takes: all on a GPU, which pages fill, and often less on a cpu."""
    memory = sizing.memories[target.memory]
    if not memory.usable_bytes or "model.memory_share" in config.set_keys:
        return target.share
    return target.share * min(1.0, sizing.needed_bytes(memory.name) / memory.usable_bytes)


def _host_cache_bytes(config: Config, targets: Iterable[TargetDevice]) -> int | None:
    if not config.cache.prefix_slots:
        return 0
    if config.cache.host != "auto":
        return config.cache.host
    return 0 if all(target.backend is Backend.CPU for target in targets) else None


def _device_plan(sizing: Sizing, target: TargetDevice, layers: LayerRange, use: MemoryUse) -> DevicePlan:
    memory = sizing.memories[target.memory]
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
        short_bytes=next((s.short_bytes for s in sizing.shortages if s.memory == target.memory), 0),
        host_state_bytes=use.host_state_bytes,
        host=target.host,
    )


def partition_problem(
    inputs: SizingInputs,
    speed_model: SpeedModel,
    goal: Goal,
    legal: Callable[[int], bool],
    ways_s: Sequence[float],
) -> PartitionProblem:
    """Return the problem for :func:`fastest_partition`, of ranges that leave room for the reference load.

    ``legal``: boundaries to choose from.  ``ways_s``: into each shard.  ``latency`` minimises the sum of all times,
    ``throughput`` the time of the slowest stage.
    """
    spec, targets = inputs.spec, inputs.targets
    memory = RangeMemory(inputs, *reference_load(inputs))

    def cost(i: int, layers: LayerRange) -> RangeCost | None:
        fits = memory.fits(i, layers)
        return RangeCost(speed_model.request_s(i, layers) + ways_s[i], memory.share(i, layers)) if fits else None

    same = [i > 0 and (goal == "latency" or target.device.group == targets[i - 1].device.group)
            for i, target in enumerate(targets)]  # fmt: skip
    return PartitionProblem(spec.n_layers, legal_boundaries(spec.n_layers, legal), same, cost)


def _by_speed(goal: str, partition: Partition) -> str:
    what = "all devices together" if goal == "latency" else "the slowest stage"
    why = "no split that fits is faster"
    if partition.seconds > partition.best_s:
        best = format_seconds(partition.best_s)
        why = f"the most evenly filled split within {SLACK:.0%} of the fastest that fits, {best}"
    return f"layers: goal {goal}: {_REQUEST} take {what} {format_seconds(partition.seconds)}; {why}"


def _choose_sizes(inputs: SizingInputs, ranges: Sequence[LayerRange], config: Config) -> Sizing:
    auto_pool = inputs.pool_pages is not None and config.kvflash.pool_tokens == "auto"
    if auto_pool:
        inputs = choose_pool(inputs, ranges, config.engine.usual_chunk)
    if config.engine.prefill_chunk == "auto":
        sizing = choose_chunk(inputs, ranges)
        if not auto_pool:
            return sizing
        inputs = choose_pool(inputs, ranges, sizing.inputs.prefill_chunk)  # a longer one takes memory
    return compute_sizes(inputs, ranges)


def _journal_bytes(sizing: Sizing, recovery: RecoveryConfig) -> int:
    """Return the most host memory of the journal: rows of every page at every boundary, within its limit."""
    inputs, limit = sizing.inputs, recovery.journal if recovery.hold_s else 0
    page_bytes = PAGE_TOKENS * dtype_bytes(inputs.dtype, inputs.spec.boundary_width)
    n_pages = (sizing.n_stages - 1) * sizing.pools.full_pages
    host = sizing.memories.get(HOST)
    if host is not None and host.usable_bytes is not None:
        limit = min(limit, max(0, host.usable_bytes - sizing.needed_bytes(HOST)))
    return min(limit // page_bytes, n_pages) * page_bytes


# ---- reasons


def _kv_saving(inputs: SizingInputs) -> Iterator[str]:
    paged = [layer for layer in inputs.spec.layers if layer.kv_group is not KvGroup.RECURRENT]
    if paged and inputs.kv_dtype is not inputs.dtype:
        kept, plain = (sum(layer.unit_bytes(f) for layer in paged) for f in (inputs.kv_dtype, inputs.dtype))
        change = f"{format_bytes(kept)} as {inputs.kv_dtype}, {format_bytes(plain)} as {inputs.dtype}"
        yield f"keys and values of {PAGE_TOKENS} tokens in all layers take {change}"


def _drafts(config: Config, sizing: Sizing, drafting: SpeculationSettings) -> Iterator[str]:
    draft, n, n_lookup = sizing.inputs.draft, sizing.drafting.max_drafts, sizing.drafting.max_lookup
    if not n:
        return
    width = "as configured" if drafting.fixed else "their number follows what is accepted"
    sources = [] if draft is None else [f"made by {draft.spec.model.name} ({draft.kind}) on {draft.target.device}"]
    sources += ["looked up in the text"] if drafting.lookup else []
    alone = f", {n_lookup} where one copies and decodes alone" if n_lookup > n else ""
    yield f"drafts: {' or '.join(sources)}, at most {n} of a sequence in a step{alone}; {width}"
    if draft is None:
        return
    why = "as configured" if config.draft.device is not None else "where the last layers are"
    captures = ", ".join(map(str, draft.spec.captures))
    reads = f"what comes out of layers {captures}" if captures else "tokens alone"
    yield f"drafter: on {draft.target.device}, {why}; it reads {reads}"
    if draft.spec.from_target and not draft.with_output:
        yield f"drafter: {draft.target.device} holds copies of the model's embedding and output matrix for it"


def _extra_models(config: Config, inputs: SizingInputs) -> Iterator[str]:
    if inputs.scorer is not None:
        placed = inputs.scorer.placed
        why = "as configured" if config.pflash.device is not None else "where the last layers are"
        yield f"scoring model: {placed.name} on {placed.device}, {why}; windows of {placed.window_tokens} tokens"
    if inputs.encoder is not None:
        encoder = inputs.encoder.placed
        why = "as configured" if config.vision.device is not None else "where the first layers are"
        images = f"images of {encoder.min_tokens} to {encoder.max_tokens} tokens"
        yield f"vision encoder: {encoder.name} on {encoder.device}, {why}; {images}"


def _residency(config: Config, sizing: Sizing) -> Iterator[str]:
    inputs, n_host = sizing.inputs, sizing.pools.host_pages
    pool = inputs.pool_pages
    if pool is None:
        return
    if pool >= pages_of(sizing.max_context):
        yield f"kvflash: {pool} pages hold the whole context, so no page is paged out"
        return
    why, policy = "", config.kvflash.policy
    if config.kvflash.pool_tokens == "auto":
        why = f"as many as the devices hold for {inputs.max_sequences} sequences, up to {MAX_AUTO_POOL_PAGES}: "
    older = {
        "qk": f"of the others those that queries attend to most; host memory has room for {n_host}",
        "drafter": f"of the others those that the scoring model finds relevant; host memory has room for {n_host}",
        "exact": f"older ones are read from host memory at every step, which has room for {n_host}",
    }.get(policy, "older ones are not read")
    protected = f"the first {HEAD_PAGES} and the {TAIL_PAGES} before a slice always stay"
    yield f"kvflash: {why}{pool} pages of a sequence stay there, policy {policy}, {protected}; {older}"


def _weights(sizing: Sizing) -> Iterator[str]:
    """Name shards that take more than the file, tensors held twice, adapters, unused tensors."""
    inputs, spec = sizing.inputs, sizing.inputs.spec
    cost = inputs.cost(spec)
    for shard, use in zip(sizing.shards, sizing.uses, strict=True):
        stored = cost.stored_bytes(shard)
        if use.weight_bytes > 1.1 * stored:
            what = f"{format_bytes(use.weight_bytes)} of weights, {format_bytes(stored)} in the file"
            yield f"{shard.device} holds {what}: {inputs.dtype} cannot use all types as stored there"
    for name in spec.output_tensors:
        if name in spec.embedding_tensors and len(sizing.shards) > 1:
            first, last = sizing.shards[0].device, sizing.shards[-1].device
            yield f"{name} is both embedding and output matrix: {first} and {last} hold a copy each"
    for adapter in spec.adapters:
        yield f"adapter {adapter.name}: {format_bytes(adapter.n_bytes(inputs.dtype))} of the weights"
    if spec.skipped:
        n_bytes = sum(spec.files.tensors[name].n_bytes for name in spec.skipped)
        what = f"{len(spec.skipped)} tensors ({format_bytes(n_bytes)})"
        yield f"{what} in the file are unused and not loaded, such as {spec.skipped[0]}"


def _memories(sizing: Sizing) -> Iterator[str]:
    targets, memories = sizing.inputs.all_targets, sizing.memories.values()
    for memory in memories:
        if memory.free_bytes is not None:
            users = list(dict.fromkeys(str(target.device) for target in targets if target.memory == memory.name))
            shared = "" if users == [memory.name] else f" for {', '.join(users)}{' together' if len(users) > 1 else ''}"
            spares = ", also for spares" if any(target.n_spares for target in targets) else ""
            share = next(target.share for target in targets if target.memory == memory.name)
            others = "" if share == 1.0 else f" or are for other models or replicas: this one may use {share:.0%}"
            kept = f"{format_bytes(memory.reserve_bytes)} of that are kept free{spares}{others}"
            yield f"{memory.name}: {format_bytes(memory.free_bytes)} are free{shared}; {kept}"
    unknown = [memory.name for memory in memories if memory.free_bytes is None]
    if unknown:
        yield f"it is unknown whether the shards fit {', '.join(unknown)}: free memory was not queried"


# ---- notices


def _unused(config: Config, sizing: Sizing) -> Iterator[str]:
    """Name settings that have no effect with this model."""
    inputs, spec, engine = sizing.inputs, sizing.inputs.spec, config.engine
    if config.model.yarn_attn_factor == "file" and "yarn_attn_factor" not in spec.options:
        yield "model.yarn_attn_factor = file has no effect: the model file holds no attention factor of YaRN"
    if inputs.max_context is not None and inputs.max_context > spec.context_tokens:
        what = f"the {spec.context_tokens} tokens the model was trained for: answers may get worse beyond that"
        yield f"engine.max_context = {inputs.max_context} exceeds {what}"
    if spec.kv_groups() == {KvGroup.RECURRENT} and engine.kv_dtype != "auto":
        yield f"engine.kv_dtype = {engine.kv_dtype} has no effect: the model has no attention layers"
    cache = config.cache
    if KvGroup.RECURRENT not in spec.kv_groups() and cache.prefix_slots and cache.states == "host":
        yield "cache.states = host has no effect: the model has no recurrent layers, and pages stay on the devices"
    if inputs.pages is None:
        return
    if KvGroup.FULL not in spec.kv_groups():
        yield f"engine.pages = {inputs.pages} has no effect: no layer of the model attends to all positions"
        return
    n_usable = inputs.max_sequences * inputs.sequence_pages(sizing.max_context) + inputs.n_slot_pages
    n_usable += sizing.most_shared_pages
    if inputs.pages > n_usable:
        slots = f", prefix slots {inputs.n_slot_pages} of them" if inputs.n_slot_pages else ""
        what = f"{inputs.max_sequences} sequences of {sizing.max_context} tokens fill {n_usable}{slots}"
        yield f"engine.pages = {inputs.pages} is more than can be used: {what}"
    if inputs.pages < inputs.max_sequences:
        held = f"engine.pages = {inputs.pages} holds no more than {inputs.pages} of {PAGE_TOKENS} tokens each"
        yield f"engine.max_sequences = {inputs.max_sequences}: {held}"


def _reduced(config: Config, sizing: Sizing, drafting: SpeculationSettings) -> Iterator[str]:
    """Name settings that are rounded or cut to another one."""
    chunk, n, pool = config.engine.prefill_chunk, sizing.prefill_chunk, sizing.inputs.pool_pages
    if chunk != "auto" and chunk > n == sizing.max_context:
        yield f"engine.prefill_chunk = {chunk} is cut to max_context = {n}"
    if config.draft.width != "auto" and drafting.max_drafts > sizing.drafting.max_drafts:
        why = f"a step verifies fewer drafts than engine.prefill_chunk, {n}"
        yield f"draft.width = {config.draft.width} is cut to {sizing.drafting.max_drafts}: {why}"
    encoder, asked = sizing.inputs.encoder, config.vision.max_tokens
    if encoder is not None and asked != "auto" and asked > encoder.placed.max_tokens:
        why = "the model reads an image in one step, of engine.prefill_chunk"
        yield f"vision.max_tokens = {asked} is cut to {encoder.placed.max_tokens}: {why}"
    if pool is None:
        return
    if config.kvflash.pool_tokens not in ("auto", pool * PAGE_TOKENS):
        rule = f"whole pages, at least {MIN_POOL_PAGES} of them"
        yield f"kvflash.pool_tokens = {config.kvflash.pool_tokens} is rounded to {pool * PAGE_TOKENS}: {rule}"
    if chunk != "auto" and chunk > n == max_resident_chunk(pool):
        yield f"engine.prefill_chunk = {chunk} is cut to {n}: with KV Flash a slice takes at most half of the pool"


# ---- advice


def advise(sizing: Sizing, ranges: Sequence[LayerRange]) -> tuple[str, ...]:
    """Return changes that make the plan fit: single ones, else the fewest together, else a last resort."""
    inputs = sizing.inputs
    keys = {  # the least harmful first
        "draft.kind": inputs.draft is not None,
        "engine.pages": inputs.pages is not None,
        "engine.max_context": inputs.max_context is not None,
        "engine.kv_dtype": inputs.kv_dtype is Dtype.FLOAT32,
        "engine.dtype": inputs.dtype is Dtype.FLOAT32,
        "engine.prefill_chunk": inputs.prefill_chunk > MIN_CHUNK,
        "engine.max_sequences": inputs.max_sequences > 1,
    }
    others = [key for key, changes in keys.items() if changes]
    singles = [_setting_that_fits(inputs, ranges, [key]) for key in (*others[:1], SPLIT_KEY, *others[1:])]
    if any(singles):
        return tuple(f"it fits with {written}" for written in singles if written)
    for n in range(1, len(others) + 1):
        for chosen in (others[:n], [*others[:n], SPLIT_KEY]):  # ranges last, so that they suit the other changes
            if written := _setting_that_fits(inputs, ranges, chosen):
                return (f"it fits with {written} together",)
    weights = format_bytes(sum(use.weight_bytes for use in sizing.uses))
    what = f"no split or setting makes it fit: the weights alone take {weights}"
    return (f"{what}; use a smaller quant of the model, or add a device to placement.target_devices",)


def _setting_that_fits(inputs: SizingInputs, ranges: Sequence[LayerRange], keys: Sequence[str]) -> str:
    """Return the keys with the values that fit, as in the configuration; or ""."""
    for key in keys:
        if key == SPLIT_KEY:
            try:
                ranges = ranges_by_memory(inputs)
            except SplitError:
                return ""
        else:
            inputs = _changed(inputs, ranges, key)
    sizing = compute_sizes(inputs, ranges)
    values = {
        "draft.kind": "off",
        "engine.pages": sizing.pools.full_pages,
        "engine.max_context": sizing.max_context,
        "engine.kv_dtype": inputs.kv_dtype,
        "engine.dtype": inputs.dtype,
        "engine.prefill_chunk": inputs.prefill_chunk,
        "engine.max_sequences": inputs.max_sequences,
        SPLIT_KEY: "[" + ", ".join(f'"{r.start}-{r.stop}"' for r in ranges) + "]",
    }
    return " and ".join(f"{key} = {values[key]}" for key in keys) if sizing.fits else ""


def _changed(inputs: SizingInputs, ranges: Sequence[LayerRange], key: str) -> SizingInputs:
    """Return the inputs with less of what a key configures."""
    short = choose_dtype("auto", inputs.targets).dtype
    short = Dtype.BFLOAT16 if short is Dtype.FLOAT32 else short
    match key:
        case "draft.kind":
            return replace(inputs, draft=None)
        case "engine.pages":
            return replace(inputs, pages=None)
        case "engine.max_context":
            return replace(inputs, max_context=None)
        case "engine.kv_dtype":
            return replace(inputs, kv_dtype=short)
        case "engine.dtype":
            return replace(inputs, dtype=short, kv_dtype=short)
        case "engine.prefill_chunk":
            while inputs.prefill_chunk > MIN_CHUNK:
                inputs = replace(inputs, prefill_chunk=max(MIN_CHUNK, inputs.prefill_chunk // 2))
                if compute_sizes(inputs, ranges).fits:
                    break
            return inputs

    def fits(n: int) -> bool:
        return n == 0 or compute_sizes(replace(inputs, max_sequences=n), ranges).fits

    return replace(inputs, max_sequences=max(1, largest_fitting(inputs.max_sequences - 1, fits)))
