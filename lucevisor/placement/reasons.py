"""Explains a placement: one sentence per choice, and notices for the user.  Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lucevisor.config import USUAL_CHUNK, Auto, Config, WeightedSplit
from lucevisor.model.pages import HEAD_PAGES, MIN_POOL_PAGES, TAIL_PAGES, max_resident_chunk, pages_of
from lucevisor.model.values import PAGE_TOKENS, LayerRange, Space
from lucevisor.placement.auto_split import AutoSplit
from lucevisor.placement.devices import HOST_PAGES, memories_of
from lucevisor.placement.dtypes import DtypeChoice
from lucevisor.placement.flash_pool import MAX_AUTO_PAGES
from lucevisor.placement.formatting import format_bytes, format_seconds
from lucevisor.placement.partition import SLACK, Partition
from lucevisor.placement.ranges import BoundaryMove
from lucevisor.placement.result import DraftPolicy
from lucevisor.placement.sizer import SPARE_STATES, SizingInputs
from lucevisor.placement.sizing import DRAFT_SHARE, UNKNOWN_PAGES, Sizing, max_usable_pages, reference_load
from lucevisor.placement.speeds import ANSWER_TOKENS, PROMPT_TOKENS

_GROWN = 1.1
"""Weights that grow by more than this factor on a device are worth a sentence."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """The planner's decisions and their inputs."""

    config: Config
    inputs: SizingInputs
    sizing: Sizing
    formats: tuple[DtypeChoice, DtypeChoice]  # of activations, of keys and values
    moves: tuple[BoundaryMove, ...]
    drafting: DraftPolicy
    auto: AutoSplit | None = None  # an automatic split and how it was found


def reasons_of(decisions: Decisions) -> tuple[str, ...]:
    """Return one sentence per choice, in the order they were made."""
    return (
        *(chosen.reason for chosen in decisions.formats),
        *_kept_smaller(decisions),
        *_devices(decisions),
        _layers(decisions),
        *_speeds(decisions),
        *_drafts(decisions),
        *_scoring(decisions),
        _context(decisions),
        _pages(decisions),
        *_residency(decisions),
        *_chunk(decisions),
        *_states(decisions),
        *_weights(decisions),
        *_skipped(decisions),
        *_memories(decisions),
    )


def notices_of(decisions: Decisions) -> tuple[str, ...]:
    """Return warnings for the start: settings that were changed or have no effect, and slow choices."""
    return (
        *(notice for chosen in decisions.formats for notice in chosen.notices),
        *_moved(decisions),
        *_inert(decisions),
        *_cut_width(decisions),
        *_rounded_pool(decisions),
    )


def _kept_smaller(decisions: Decisions) -> Iterator[str]:
    """Say what a kv_dtype other than dtype saves or costs."""
    inputs = decisions.inputs
    paged = [layer for layer in inputs.spec.layers if layer.space is not Space.RECURRENT]
    if paged and inputs.kv_dtype is not inputs.dtype:
        kept, plain = (sum(layer.unit_bytes(f) for layer in paged) for f in (inputs.kv_dtype, inputs.dtype))
        change = f"{format_bytes(kept)} as {inputs.kv_dtype}, {format_bytes(plain)} as {inputs.dtype}"
        yield f"keys and values of {PAGE_TOKENS} tokens in all layers take {change}"


def _devices(decisions: Decisions) -> Iterator[str]:
    if "placement.target_devices" not in decisions.config.set_keys:
        yield "devices: all of all groups, as placement.target_devices names none"


def _layers(decisions: Decisions) -> str:
    split = decisions.config.placement.split
    if isinstance(split, WeightedSplit):
        weights, n = decisions.config.placement.split_text(), decisions.inputs.spec.n_layers
        return f"layers: {n} split by the weights {weights}, rounded cumulatively"
    if not isinstance(split, Auto):
        return "layers: ranges as configured"
    if decisions.auto is not None and decisions.auto.found is not None:
        return _by_speed(decisions.auto.goal, decisions.auto.found)
    memories = memories_of(decisions.inputs.targets).values()
    known = [f"{m.name} {format_bytes(m.usable_bytes)}" for m in memories if m.usable_bytes is not None]
    if not known:
        return "layers: about equal bytes per device, as their free memory is unknown"
    return f"layers: split so that the fullest device is least full; usable memory: {', '.join(known)}"


def _by_speed(goal: str, found: Partition) -> str:
    what = "all devices together" if goal == "latency" else "the slowest stage"
    request = f"{PROMPT_TOKENS} prompt tokens and {ANSWER_TOKENS} generated tokens"
    least = "no split that fits is faster"
    if found.seconds > found.best_s:
        least = f"the least full split within {SLACK:.0%} of the fastest that fits, {format_seconds(found.best_s)}"
    return f"layers: goal {goal}: {request} take {what} {format_seconds(found.seconds)}; {least}"


def _speeds(decisions: Decisions) -> Iterator[str]:
    """Say how fast the devices are, and when that was measured."""
    auto = decisions.auto
    if auto is None or len(decisions.inputs.targets) == 1:
        return
    if auto.speed_model is None:
        yield "device speeds are unknown: the first start with this model measures them, as does plan --measure"
        return
    speeds = auto.speed_model.speeds
    if auto.found is None:
        context = reference_load(decisions.inputs)[0]
        yield f"speeds were measured ({speeds.measured}) and not used: no split leaves room for {context} tokens"
        return
    for i, shard in enumerate(decisions.sizing.shards):
        decode_s, prefill_s = auto.speed_model.seconds(i, shard.layers)
        n_layers, n_rows = shard.layers.stop - shard.layers.start, speeds.conditions.n_rows
        layers = "1 layer takes" if n_layers == 1 else f"{n_layers} layers take"
        times = f"{format_seconds(decode_s)} per token, {format_seconds(prefill_s)} for {n_rows} tokens at once"
        yield f"{shard.device}: {layers} {times}"
    yield f"speeds were measured {speeds.measured}; plan --measure repeats it"


def _scoring(decisions: Decisions) -> Iterator[str]:
    scorer = decisions.inputs.scorer
    if scorer is not None:
        why = "as configured" if decisions.config.pflash.device is not None else "where the last layers are"
        windows = f"windows of {scorer.window_tokens} tokens"
        yield f"scoring model: {scorer.spec.name} on {scorer.target.device}, {why}; {windows}"


def _drafts(decisions: Decisions) -> Iterator[str]:
    drafting, draft, n = decisions.drafting, decisions.inputs.draft, decisions.sizing.max_drafts
    if not n:
        return
    width = "as configured" if drafting.fixed else "their number follows what is accepted"
    looked_up = "looked up in the text" if drafting.lookup else ""
    by = [] if draft is None else [f"made by {draft.spec.model.name} ({draft.kind}) on {draft.target.device}"]
    yield f"drafts: {' or '.join([*by, looked_up]).removesuffix(' or ')}, at most {n} of a sequence in a step; {width}"
    if draft is None:
        return
    why = "as configured" if decisions.config.draft.device is not None else "where the last layers are"
    captures = ", ".join(map(str, draft.spec.captures))
    yield f"drafter: on {draft.target.device}, {why}; it reads what comes out of layers {captures}"
    if draft.spec.from_target and not draft.with_output:
        yield f"drafter: {draft.target.device} holds copies of the model's embedding and output matrix for it"


def _context(decisions: Decisions) -> str:
    inputs, sizing = decisions.inputs, decisions.sizing
    chosen, trained = sizing.max_context, inputs.spec.context_tokens
    if inputs.max_context is not None:
        return f"max_context {chosen}: as configured"
    if chosen == trained:
        return f"max_context {chosen}: the model's own"
    if inputs.pages is not None and pages_of(chosen) == inputs.pages:
        return f"max_context {chosen}: engine.pages = {inputs.pages} hold no more; the model's own is {trained}"
    if pages_of(chosen) == UNKNOWN_PAGES:
        why = "limited because free memory is unknown"
        return f"max_context {chosen}: {why}; the model's own is {trained}, engine.max_context sets it"
    return f"max_context {chosen}: the longest sequence that fits; the model's own is {trained}"


def _pages(decisions: Decisions) -> str:
    sizing, n = decisions.sizing, decisions.sizing.pools.full_pages
    if Space.FULL not in decisions.inputs.spec.spaces():
        return "pages 0: no layer of the model attends to all positions"
    slots = " and prefix slots" if decisions.inputs.n_slot_pages else ""
    resident = decisions.inputs.sequence_pages(sizing.max_context) * PAGE_TOKENS
    each = f"{sizing.max_context} tokens" if resident >= sizing.max_context else f"{resident} resident tokens"
    enough = f"{decisions.inputs.max_sequences} sequences of {each}{slots}"
    match sizing.bound:
        case "configured":
            return f"pages {n}: as configured"
        case "enough":
            return f"pages {n}: enough for {enough}"
        case "unknown":
            return f"pages {n}: limited because free memory is unknown; engine.pages sets it"
        case "moderate":
            most = max_usable_pages(decisions.inputs, sizing.max_context)
            share = f"{HOST_PAGES:.0%} of the host's usable memory or one sequence"
            return f"pages {n}: as many as fit in {share}; {enough} would use {most}, and engine.pages sets more"
        case memory:
            most = max_usable_pages(decisions.inputs, sizing.max_context)
            return f"pages {n}: as many as fit in {memory}; {enough} would use {most}"


def _residency(decisions: Decisions) -> Iterator[str]:
    """Say what KV Flash keeps of a sequence."""
    pool, context = decisions.inputs.pool_pages, decisions.sizing.max_context
    if pool is None:
        return
    if pool >= pages_of(context):
        yield f"kvflash: {pool} pages hold the whole context, so no page is paged out"
        return
    protected = f"the first {HEAD_PAGES} and the {TAIL_PAGES} before a slice always stay"
    why = ""
    if decisions.config.kvflash.pool_tokens == "auto":
        why = f"as many as the devices hold for {decisions.inputs.max_sequences} sequences, up to {MAX_AUTO_PAGES}: "
    policy, n_host = decisions.config.kvflash.policy, decisions.sizing.pools.host_pages
    older = "older ones are not read"
    if policy == "qk":
        older = f"of the others those that queries attend to most; host memory has room for {n_host}"
    elif policy == "drafter":
        older = f"of the others those that the scoring model finds relevant; host memory has room for {n_host}"
    elif policy == "exact":
        older = f"older ones are read from host memory at every step, which has room for {n_host}"
    yield f"kvflash: {why}{pool} pages of a sequence stay there, policy {policy}, {protected}; {older}"


def _rounded_pool(decisions: Decisions) -> Iterator[str]:
    pool, wanted = decisions.inputs.pool_pages, decisions.config.kvflash.pool_tokens
    if pool is None:
        return
    if wanted not in ("auto", pool * PAGE_TOKENS):
        rule = f"whole pages, at least {MIN_POOL_PAGES} of them"
        yield f"kvflash.pool_tokens = {wanted} is rounded to {pool * PAGE_TOKENS}: {rule}"
    chunk, most = decisions.config.engine.prefill_chunk, max_resident_chunk(pool)
    if chunk != "auto" and chunk > most and decisions.sizing.prefill_chunk == most:
        yield f"engine.prefill_chunk = {chunk} is cut to {most}: with KV Flash a slice takes at most half of the pool"


def _chunk(decisions: Decisions) -> Iterator[str]:
    """Say why an automatic prefill chunk is not the usual one."""
    chunk, automatic = decisions.sizing.prefill_chunk, decisions.config.engine.prefill_chunk == "auto"
    if automatic and chunk > USUAL_CHUNK:
        yield f"prefill_chunk {chunk}: GPUs compute prompts faster so, and there is memory for it; less beside others"


def _states(decisions: Decisions) -> Iterator[str]:
    pools, n = decisions.sizing.pools, decisions.inputs.max_sequences
    if pools.host_states:
        kept = f"{pools.host_states - SPARE_STATES} for prefix slots, and {SPARE_STATES} spare"
        on_devices = f"one on the devices for each of {n} sequences"
        yield f"recurrent states {pools.states}: {on_devices}; in host memory {kept}"
    elif pools.states:
        n_spare = min(SPARE_STATES, pools.states - n)
        n_kept = pools.states - n - n_spare
        kept = f", {n_kept} for prefix slots" if n_kept else ""
        yield f"recurrent states {pools.states}: one for each of {n} sequences{kept}, and {n_spare} spare"
    if pools.window_pages:
        window = decisions.inputs.spec.window
        kept = " and prefix slots" if decisions.sizing.n_slots else ""
        yield f"window pages {pools.window_pages}: what {n} sequences{kept} hold at a window of {window} tokens"
    n_slots, wanted = decisions.sizing.n_slots, decisions.inputs.n_slots
    if n_slots < wanted:
        yield f"prefix slots: memory is reserved for {n_slots}; {wanted}, as cache.memory allows, do not fit"


def details_of(decisions: Decisions) -> Iterator[str]:
    """Yield a sentence per choice that only those need who tune drafting."""
    pools, n, n_drafts = decisions.sizing.pools, decisions.inputs.max_sequences, decisions.sizing.n_draft_states
    wanted_drafts = n * decisions.sizing.max_drafts
    if pools.states and wanted_drafts:
        layers, kv_dtype = LayerRange(0, decisions.inputs.spec.n_layers), decisions.inputs.kv_dtype
        each = f"{format_bytes(decisions.inputs.spec.draft_state_bytes(layers, kv_dtype))} each"
        if n_drafts < wanted_drafts:
            limit = f"within {DRAFT_SHARE:.0%} of the memory and of the pages; {n} sequences would use {wanted_drafts}"
            yield f"updates for verifying {n_drafts} drafts, {each}: as many as fit {limit}"
        else:
            yield f"updates for verifying {n_drafts} drafts, {each}: all of {n} sequences"


def _weights(decisions: Decisions) -> Iterator[str]:
    """Name shards whose weights take more than in the file, and tensors used as both embedding and lm_head."""
    spec, model = decisions.inputs.spec, decisions.inputs.model()
    for shard, use in zip(decisions.sizing.shards, decisions.sizing.uses, strict=True):
        stored = model.stored_bytes(shard)
        if use.weight_bytes > stored * _GROWN:
            what = f"{format_bytes(use.weight_bytes)} of weights, {format_bytes(stored)} in the file"
            yield f"{shard.device} holds {what}: {decisions.inputs.dtype} cannot use all types as stored there"
    for name in spec.output_tensors:
        if name in spec.embedding_tensors and len(decisions.sizing.shards) > 1:
            first, last = decisions.sizing.shards[0].device, decisions.sizing.shards[-1].device
            yield f"{name} is both embedding and output matrix: {first} and {last} hold a copy each"


def _skipped(decisions: Decisions) -> Iterator[str]:
    spec = decisions.inputs.spec
    if spec.skipped and spec.files is not None:
        n_bytes = sum(spec.files.tensors[name].n_bytes for name in spec.skipped)
        what = f"{len(spec.skipped)} tensors ({format_bytes(n_bytes)})"
        yield f"{what} in the file are unused and not loaded, such as {spec.skipped[0]}"


def _memories(decisions: Decisions) -> Iterator[str]:
    """Say how much memory is free and how much of it is kept free."""
    memories = memories_of(decisions.inputs.all_targets).values()
    for memory in memories:
        if memory.free_bytes is not None:
            targets = decisions.inputs.all_targets
            users = list(dict.fromkeys(str(target.device) for target in targets if target.memory == memory.name))
            shared = "" if users == [memory.name] else f" for {', '.join(users)}{' together' if len(users) > 1 else ''}"
            kept = format_bytes(memory.reserve_bytes)
            spares = ", also for spares" if any(target.n_spares for target in targets) else ""
            free = format_bytes(memory.free_bytes)
            yield f"{memory.name}: {free} are free{shared}; {kept} of that are kept free{spares}"
    unknown = [memory.name for memory in memories if memory.free_bytes is None]
    if unknown:
        yield f"it is unknown whether the shards fit {', '.join(unknown)}: free memory was not queried"


def _moved(decisions: Decisions) -> Iterator[str]:
    for move in decisions.moves:
        before, behind = (decisions.sizing.shards[i].device for i in (move.shard - 1, move.shard))
        yield (
            f"placement.target_layer_split: the boundary between {before} and {behind} moved from layer {move.wanted} "
            f"to {move.chosen}, the nearest where no layers share state across the boundary"
        )


def _inert(decisions: Decisions) -> Iterator[str]:
    """Name settings of [engine], [model] and [cache] that have no effect or less than configured."""
    inputs, sizing, engine = decisions.inputs, decisions.sizing, decisions.config.engine
    spec, context = inputs.spec, sizing.max_context
    if decisions.config.model.yarn_attn_factor == "file" and "yarn_attn_factor" not in spec.options:
        yield "model.yarn_attn_factor = file has no effect: the model file holds no attention factor of YaRN"
    if inputs.max_context is not None and inputs.max_context > spec.context_tokens:
        yield (
            f"engine.max_context = {inputs.max_context} exceeds the {spec.context_tokens} tokens the model was trained "
            "for: answers may get worse beyond that"
        )
    if engine.prefill_chunk != "auto" and engine.prefill_chunk > sizing.prefill_chunk == context:
        yield f"engine.prefill_chunk = {engine.prefill_chunk} is cut to max_context = {context}"
    if spec.spaces() == {Space.RECURRENT} and engine.kv_dtype != "auto":
        yield f"engine.kv_dtype = {engine.kv_dtype} has no effect: the model has no attention layers"
    cache = decisions.config.cache
    if Space.RECURRENT not in spec.spaces() and cache.prefix_slots and cache.states == "host":
        yield "cache.states = host has no effect: the model has no recurrent layers, and pages stay on the devices"
    if inputs.pages is None:
        return
    if Space.FULL not in spec.spaces():
        yield f"engine.pages = {inputs.pages} has no effect: no layer of the model attends to all positions"
        return
    most = inputs.max_sequences * inputs.sequence_pages(context) + inputs.n_slot_pages
    if inputs.pages > most:
        slots = f", prefix slots {inputs.n_slot_pages} of them" if inputs.n_slot_pages else ""
        yield (
            f"engine.pages = {inputs.pages} is more than can be used: {inputs.max_sequences} sequences of {context} "
            f"tokens fill {most}{slots}"
        )
    if inputs.pages < inputs.max_sequences:
        yield (
            f"engine.max_sequences = {inputs.max_sequences}: engine.pages = {inputs.pages} holds no more than "
            f"{inputs.pages} of {PAGE_TOKENS} tokens each"
        )


def _cut_width(decisions: Decisions) -> Iterator[str]:
    width = decisions.config.draft.width
    if width != "auto" and decisions.drafting.max_drafts > decisions.sizing.max_drafts:
        n, chunk = decisions.sizing.max_drafts, decisions.sizing.prefill_chunk
        yield f"draft.width = {width} is cut to {n}: a step verifies fewer drafts than engine.prefill_chunk, {chunk}"
