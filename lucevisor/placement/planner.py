"""From a model, a configuration and the devices found to a placement, or to why there is none.

Pure: the caller opens the model's header and asks the devices.  Invariant: a Placement covers every layer once, in the
order of ``target_devices``, and where the free memory is known it fits; what does not fit is an Infeasible with advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lucevisor.config import Auto, Config, Ranges, Split
from lucevisor.model.pages import pages_of
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Dtype, LayerRange, Space
from lucevisor.placement.advice import advise
from lucevisor.placement.auto import Automatic, automatic
from lucevisor.placement.devices import Inventory, Seat, memories_of, seats_of
from lucevisor.placement.formats import choose_dtype, choose_kv_dtype
from lucevisor.placement.ranges import Move, SplitError, from_ranges, from_weights, legalise
from lucevisor.placement.reasons import Facts, notices_of, reasons_of
from lucevisor.placement.result import DevicePlan, Infeasible, Placement, PlacementError
from lucevisor.placement.sizing import Case, Sized, size, slots_set_aside
from lucevisor.placement.speeds import Clock, Speeds
from lucevisor.placement.stages import arenas_of, stages_of

SPLIT_KEY = "placement.target_layer_split"
DEVICES_KEY = "placement.target_devices"


def plan(
    spec: ModelSpec, config: Config, inventory: Inventory | None = None, speeds: Speeds | None = None
) -> Placement | Infeasible:
    """Place ``spec`` on the devices of ``config``.

    ``spec.files`` must be set.  ``inventory``: what each group's daemon or probe said of its devices; a group that is
    missing, or None, leaves free memory unknown: nothing is then said about fitting there, and automatic sizes stay
    small.  ``speeds``: what was measured for this model on these devices, from which an automatic split is chosen;
    None: it goes by memory.  Raises PlacementError (a ConfigError) for settings that cannot be meant: a split that does
    not match the layers, a device that is not there, pages that hold less than the context.
    """
    seats = seats_of(config, inventory)
    dtype = choose_dtype(config.engine.dtype, seats)
    kv_dtype = choose_kv_dtype(config.engine.kv_dtype, dtype.dtype)
    case = _case(spec, config, seats, dtype.dtype, kv_dtype.dtype)
    auto, ranges, moves = split_layers(case, config.placement.split, config, speeds)
    sized = size(case, ranges)
    facts = Facts(config, case, sized, (dtype, kv_dtype), moves, auto)
    placement = replace(
        timed(assemble(case, sized), auto),
        options=model_options(config),
        reasons=reasons_of(facts),
        notices=notices_of(facts),
    )
    if sized.fits:
        return placement
    return Infeasible(placement, sized.shortages, advise(case, ranges, sized))


def model_options(config: Config) -> dict[str, str]:
    """Return the options of the model's family: what ``open_spec`` and the daemons read, ``Load.options``."""
    return {} if config.model.yarn_attn_factor == "default" else {"yarn_attn_factor": config.model.yarn_attn_factor}


def split_layers(
    case: Case, split: Split, config: Config, speeds: Speeds | None
) -> tuple[Automatic | None, tuple[LayerRange, ...], tuple[Move, ...]]:
    """Turn the configured split into ranges that the model allows.  Raises PlacementError."""
    n_layers = case.spec.n_layers
    try:
        if isinstance(split, Auto):
            clock = None if speeds is None else Clock.of(case.spec, speeds)
            auto = automatic(case, clock, config.placement.goal)
            return auto, auto.ranges, ()
        if isinstance(split, Ranges):
            ranges = from_ranges(split.values, n_layers)
        else:
            ranges = from_weights(split.values, n_layers)
        return None, *legalise(ranges, case.spec.legal_boundary)
    except SplitError as error:
        if error.of_devices:
            key, value = DEVICES_KEY, [str(device) for device in config.placement.devices]
            raise PlacementError(key, value, error.why, error.hint, file=str(config.file)) from None
        text = config.placement.split_text()
        raise PlacementError(SPLIT_KEY, text, error.why, error.hint, file=str(config.file)) from None


def assemble(case: Case, sized: Sized) -> Placement:
    """Put the sizes of a case into a placement, without reasons."""
    spec = case.spec
    stages = stages_of(sized.shards)
    return Placement(
        model=spec.name,
        architecture=spec.architecture,
        quant=spec.quant,
        n_layers=spec.n_layers,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
        max_context=sized.max_context,
        max_sequences=case.max_sequences,
        prefill_chunk=sized.prefill_chunk,
        max_step_tokens=sized.max_step_tokens,
        pools=sized.pools,
        spaces=spec.spaces(),
        window_tokens=spec.window if Space.WINDOW in spec.spaces() else None,
        devices=_device_plans(case.seats, sized),
        stages=stages,
        arenas=arenas_of(len(stages), sized.max_step_tokens, spec.boundary_width, case.dtype),
    )


def timed(placement: Placement, auto: Automatic | None) -> Placement:
    """Note the times from which an automatic split was chosen."""
    if auto is None or auto.clock is None or auto.found is None:
        return placement
    times = [auto.clock.seconds(i, device.layers) for i, device in enumerate(placement.devices)]
    devices = tuple(
        replace(device, decode_s=decode_s, prefill_s=prefill_s)
        for device, (decode_s, prefill_s) in zip(placement.devices, times, strict=True)
    )
    return replace(placement, devices=devices, goal=auto.goal, measured=auto.clock.speeds.measured)


def _device_plans(seats: Sequence[Seat], sized: Sized) -> tuple[DevicePlan, ...]:
    memories = memories_of(seats)
    short = {shortage.memory: shortage.short_bytes for shortage in sized.shortages}
    return tuple(
        DevicePlan(
            device=seat.device,
            backend=seat.backend,
            name=seat.info.name if seat.info is not None else "",
            memory=seat.memory,
            layers=shard.layers,
            weight_bytes=use.weight_bytes,
            state_bytes=use.state_bytes,
            workspace_bytes=use.workspace_bytes,
            free_bytes=memories[seat.memory].free_bytes,
            reserve_bytes=memories[seat.memory].reserve_bytes,
            short_bytes=short.get(seat.memory, 0),
            host_state_bytes=use.host_state_bytes,
        )
        for seat, shard, use in zip(seats, sized.shards, sized.uses, strict=True)
    )


def _case(spec: ModelSpec, config: Config, seats: tuple[Seat, ...], dtype: Dtype, kv_dtype: Dtype) -> Case:
    """Read what the engine section fixes.  Raises PlacementError where two of its keys contradict each other."""
    engine, file = config.engine, str(config.file)
    max_context = None if engine.max_context == "auto" else engine.max_context
    pages = None if engine.pages == "auto" else engine.pages
    if max_context is not None and max_context < 2:
        why = "leaves no room for an answer: a token of prompt and one more need 2"
        raise PlacementError("engine.max_context", max_context, why, "nearest: 2", file=file)
    paged = Space.FULL in spec.spaces()
    if paged and pages is not None and max_context is not None and pages < pages_of(max_context):
        why = f"hold {pages * PAGE_TOKENS} tokens, less than engine.max_context = {max_context}"
        hint = f"nearest: {pages_of(max_context)}, or engine.max_context = {pages * PAGE_TOKENS}"
        raise PlacementError("engine.pages", pages, why, hint, file=file)
    n_slots, n_slot_pages = slots_set_aside(spec, kv_dtype, config.cache.prefix_slots, config.cache.memory)
    return Case(
        spec=spec,
        seats=seats,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_sequences=engine.max_sequences,
        prefill_chunk=engine.prefill_chunk,
        max_context=max_context,
        pages=pages,
        n_slots=n_slots,
        n_slot_pages=n_slot_pages,
        states_in_host=config.cache.states == "host" and n_slots > 0,
    )
