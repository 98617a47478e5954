"""Why a placement is what it is, and what the user should know about it, in sentences.  Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lucevisor.config import Auto, Config, WeightedSplit
from lucevisor.model.pages import pages_of
from lucevisor.model.values import PAGE_TOKENS, Space
from lucevisor.placement.amounts import seconds, size
from lucevisor.placement.auto import Automatic
from lucevisor.placement.devices import memories_of
from lucevisor.placement.fastest import SLACK, Found
from lucevisor.placement.formats import Chosen
from lucevisor.placement.ranges import Move
from lucevisor.placement.sizing import SPARE_STATES, UNKNOWN_PAGES, Case, Sized, most_used, reference
from lucevisor.placement.speeds import ANSWER_TOKENS, PROMPT_TOKENS

_GROWN = 1.1
"""Weights that take this many times their bytes in the file on a device are worth a sentence."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was decided, and from what."""

    config: Config
    case: Case
    sized: Sized
    formats: tuple[Chosen, Chosen]  # of activations, of keys and values
    moves: tuple[Move, ...]
    auto: Automatic | None = None  # an automatic split and how it was found


def reasons_of(facts: Facts) -> tuple[str, ...]:
    """Return a sentence for each choice, in the order in which they were made."""
    return (
        *(chosen.reason for chosen in facts.formats),
        *_kept_smaller(facts),
        _layers(facts),
        *_speeds(facts),
        _context(facts),
        _pages(facts),
        *_states(facts),
        *_weights(facts),
        *_skipped(facts),
        *_memories(facts),
    )


def notices_of(facts: Facts) -> tuple[str, ...]:
    """Return what to warn about at start: settings that were changed or have no effect, and slow choices."""
    return (
        *(notice for chosen in facts.formats for notice in chosen.notices),
        *_moved(facts),
        *_inert(facts),
    )


def _kept_smaller(facts: Facts) -> Iterator[str]:
    """What keys and values of another format than the activations' save, or cost."""
    case = facts.case
    paged = [layer for layer in case.spec.layers if layer.space is not Space.RECURRENT]
    if paged and case.kv_dtype is not case.dtype:
        kept, plain = (sum(layer.unit_bytes(f) for layer in paged) for f in (case.kv_dtype, case.dtype))
        change = f"{size(kept)} as {case.kv_dtype}, {size(plain)} as {case.dtype}"
        yield f"keys and values of {PAGE_TOKENS} tokens in all layers take {change}"


def _layers(facts: Facts) -> str:
    split = facts.config.placement.split
    if isinstance(split, WeightedSplit):
        weights, n = facts.config.placement.split_text(), facts.case.spec.n_layers
        return f"layers: {n} shared out by the weights {weights}, sums rounded"
    if not isinstance(split, Auto):
        return "layers: ranges as configured"
    if facts.auto is not None and facts.auto.found is not None:
        return _by_speed(facts.auto.goal, facts.auto.found)
    memories = memories_of(facts.case.seats).values()
    known = [f"{m.name} {size(m.usable_bytes)}" for m in memories if m.usable_bytes is not None]
    if not known:
        return "layers: about equal bytes for each device, whose free memory is not known"
    return f"layers: the fullest device is as little full as possible; usable are {', '.join(known)}"


def _by_speed(goal: str, found: Found) -> str:
    what = "all devices together" if goal == "latency" else "the slowest stage"
    request = f"a prompt of {PROMPT_TOKENS} tokens and an answer of {ANSWER_TOKENS}"
    least = "no split that fits takes less"
    if found.seconds > found.best_s:
        least = f"the least full split within {SLACK:.0%} of the fastest that fits, {seconds(found.best_s)}"
    return f"layers: goal {goal}: {request} take {what} {seconds(found.seconds)}; {least}"


def _speeds(facts: Facts) -> Iterator[str]:
    """What is known of the devices' speeds, and from when."""
    auto = facts.auto
    if auto is None or len(facts.case.seats) == 1:
        return
    if auto.clock is None:
        yield "speeds of the devices are not known: the first start with this model measures them, or plan --measure"
        return
    speeds = auto.clock.speeds
    if auto.found is None:
        context = reference(facts.case)[0]
        yield f"speeds were measured ({speeds.measured}) and not used: no split leaves room for {context} tokens"
        return
    for i, shard in enumerate(facts.sized.shards):
        decode_s, prefill_s = auto.clock.seconds(i, shard.layers)
        n_layers, n_rows = shard.layers.stop - shard.layers.start, speeds.conditions.n_rows
        layers = "1 layer takes" if n_layers == 1 else f"{n_layers} layers take"
        yield f"{shard.device}: {layers} {seconds(decode_s)} a token, {seconds(prefill_s)} for {n_rows} at once"
    yield f"speeds were measured {speeds.measured}; plan --measure does it again"


def _context(facts: Facts) -> str:
    case, sized = facts.case, facts.sized
    chosen, trained = sized.max_context, case.spec.context_tokens
    if case.max_context is not None:
        return f"max_context {chosen}: as configured"
    if chosen == trained:
        return f"max_context {chosen}: the model's own"
    if case.pages is not None and pages_of(chosen) == case.pages:
        return f"max_context {chosen}: engine.pages = {case.pages} hold no more; the model's own is {trained}"
    if pages_of(chosen) == UNKNOWN_PAGES:
        why = "free memory is not known, so no more is promised"
        return f"max_context {chosen}: {why}; the model's own is {trained}, engine.max_context sets it"
    return f"max_context {chosen}: the longest of which one sequence fits; the model's own is {trained}"


def _pages(facts: Facts) -> str:
    sized, n = facts.sized, facts.sized.pools.full_pages
    if Space.FULL not in facts.case.spec.spaces():
        return "pages 0: no layer of the model attends to all positions"
    slots = " and prefix slots" if facts.case.n_slot_pages else ""
    enough = f"{facts.case.max_sequences} sequences of {sized.max_context} tokens{slots}"
    match sized.bound:
        case "asked":
            return f"pages {n}: as configured"
        case "enough":
            return f"pages {n}: enough for {enough}"
        case "unknown":
            return f"pages {n}: free memory is not known, so no more are promised; engine.pages sets it"
        case memory:
            most = most_used(facts.case, sized.max_context)
            return f"pages {n}: as many as fit in {memory}; {enough} would use {most}"


def _states(facts: Facts) -> Iterator[str]:
    pools, n = facts.sized.pools, facts.case.max_sequences
    if pools.host_states:
        kept = f"{pools.host_states - SPARE_STATES} for prefix slots, and {SPARE_STATES} spare"
        yield f"recurrent states {pools.states}: one on the devices for each of {n} sequences; in host memory {kept}"
    elif pools.states:
        n_spare = min(SPARE_STATES, pools.states - n)
        n_kept = pools.states - n - n_spare
        kept = f", {n_kept} for prefix slots" if n_kept else ""
        yield f"recurrent states {pools.states}: one for each of {n} sequences{kept}, and {n_spare} spare"
    if pools.window_pages:
        window = facts.case.spec.window
        kept = " and prefix slots" if facts.sized.n_slots else ""
        yield f"window pages {pools.window_pages}: what {n} sequences{kept} hold at a window of {window} tokens"
    n_slots, wanted = facts.sized.n_slots, facts.case.n_slots
    if n_slots < wanted:
        yield f"prefix slots: memory is set aside for {n_slots}; {wanted}, as cache.memory allows, do not fit"


def _weights(facts: Facts) -> Iterator[str]:
    """Sentences on weights that take more than in the file, and on a table that is kept at both ends."""
    spec, model = facts.case.spec, facts.case.model()
    for shard, use in zip(facts.sized.shards, facts.sized.uses, strict=True):
        stored = model.stored_bytes(shard)
        if use.weight_bytes > stored * _GROWN:
            what = f"{size(use.weight_bytes)} of weights, {size(stored)} in the file"
            yield f"{shard.device} holds {what}: not all its types are multiplied as stored in {facts.case.dtype} there"
    for name in spec.output_tensors:
        if name in spec.embedding_tensors and len(facts.sized.shards) > 1:
            first, last = facts.sized.shards[0].device, facts.sized.shards[-1].device
            yield f"{name} is both embedding and output matrix: {first} and {last} hold a copy each"


def _skipped(facts: Facts) -> Iterator[str]:
    spec = facts.case.spec
    if spec.skipped and spec.files is not None:
        n_bytes = sum(spec.files.tensors[name].n_bytes for name in spec.skipped)
        what = f"{len(spec.skipped)} tensors ({size(n_bytes)})"
        yield f"{what} of the file are not used and not loaded, the first is {spec.skipped[0]}"


def _memories(facts: Facts) -> Iterator[str]:
    """What was free where, and how much of it is left alone."""
    memories = memories_of(facts.case.seats).values()
    for memory in memories:
        if memory.free_bytes is not None:
            users = [str(seat.device) for seat in facts.case.seats if seat.memory == memory.name]
            shared = "" if users == [memory.name] else f" for {', '.join(users)}{' together' if len(users) > 1 else ''}"
            kept = size(memory.reserve_bytes)
            yield f"{memory.name}: {size(memory.free_bytes)} are free{shared}, {kept} of that are left alone"
    unknown = [memory.name for memory in memories if memory.free_bytes is None]
    if unknown:
        yield f"whether it fits is not known for {', '.join(unknown)}: free memory was not asked for"


def _moved(facts: Facts) -> Iterator[str]:
    for move in facts.moves:
        before, behind = (facts.sized.shards[i].device for i in (move.shard - 1, move.shard))
        yield (
            f"placement.target_layer_split: the boundary between {before} and {behind} moved from layer {move.wanted} "
            f"to {move.chosen}, the nearest where no layer reads state of a layer in front of the cut"
        )


def _inert(facts: Facts) -> Iterator[str]:
    """Settings of the engine and model sections that do less than they say."""
    case, sized, engine = facts.case, facts.sized, facts.config.engine
    spec, context = case.spec, sized.max_context
    if facts.config.model.yarn_attn_factor == "file" and "yarn_attn_factor" not in spec.options:
        yield "model.yarn_attn_factor = file has no effect: the model file holds no attention factor of YaRN"
    if case.max_context is not None and case.max_context > spec.context_tokens:
        yield (
            f"engine.max_context = {case.max_context} is longer than the {spec.context_tokens} tokens the model was "
            "made for: answers may get worse behind that"
        )
    if engine.prefill_chunk > sized.prefill_chunk and "engine.prefill_chunk" in facts.config.set_keys:
        yield f"engine.prefill_chunk = {engine.prefill_chunk} is cut to max_context = {context}"
    if spec.spaces() == {Space.RECURRENT} and engine.kv_dtype != "auto":
        yield f"engine.kv_dtype = {engine.kv_dtype} has no effect: the model has no attention layers"
    if Space.RECURRENT not in spec.spaces() and facts.config.cache.prefix_slots and facts.config.cache.states == "host":
        yield "cache.states = host has no effect: the model has no recurrent layers, and pages stay on the devices"
    if case.pages is None:
        return
    if Space.FULL not in spec.spaces():
        yield f"engine.pages = {case.pages} has no effect: no layer of the model attends to all positions"
        return
    most = case.max_sequences * pages_of(context) + case.n_slot_pages
    if case.pages > most:
        slots = f", prefix slots {case.n_slot_pages} of them" if case.n_slot_pages else ""
        yield (
            f"engine.pages = {case.pages} is more than can be used: {case.max_sequences} sequences of {context} tokens "
            f"fill {most}{slots}"
        )
    if case.pages < case.max_sequences:
        yield (
            f"engine.max_sequences = {case.max_sequences}: engine.pages = {case.pages} hold {case.pages} sequences at "
            f"most, of {PAGE_TOKENS} tokens each"
        )
