"""Derives the engine's limits from a placement: rows, sequences, pages, prefix slots.  Pure."""

from __future__ import annotations

from lucevisor.config import CacheConfig
from lucevisor.engine.limits import EngineLimits, SpeculationSettings
from lucevisor.kv.prefix_records import PrefixSettings
from lucevisor.kv.residency import Residency
from lucevisor.model.spec import ModelSpec
from lucevisor.placement.result import Placement
from lucevisor.placement.sizing import slot_unit_bytes
from lucevisor.protocol.loading import DraftKind


def engine_limits(
    cache: CacheConfig, spec: ModelSpec, placement: Placement, drafter: ModelSpec | None = None
) -> EngineLimits:
    """Limits of the engine that runs ``placement``.  ``drafter``: the layers of the drafter that is placed."""
    return EngineLimits(
        max_sequences=placement.max_sequences,
        max_context=placement.max_context,
        prefill_chunk=placement.prefill_chunk,
        max_step_tokens=placement.max_step_tokens,
        spaces=placement.spaces,
        pools=placement.pools,
        window_tokens=placement.window_tokens,
        prefix=_prefix_settings(cache, spec, placement, drafter),
        residency=_residency(placement),
        speculation=_speculation_settings(spec, placement),
    )


def _residency(placement: Placement) -> Residency | None:
    if placement.pool_pages is None:
        return None
    return Residency(placement.pool_pages, placement.residency_policy, placement.tau)


def _speculation_settings(spec: ModelSpec, placement: Placement) -> SpeculationSettings:
    drafting, draft = placement.drafting, placement.draft
    return SpeculationSettings(
        max_drafts=drafting.max_drafts,
        drafter=draft is not None,
        lookup=drafting.lookup,
        kind=draft.kind if draft is not None else DraftKind.MTP,
        fixed=drafting.fixed,
        n_vocabulary=spec.vocabulary,
    )


def _prefix_settings(
    cache: CacheConfig, spec: ModelSpec, placement: Placement, drafter: ModelSpec | None
) -> PrefixSettings:
    """Return the bounds of prefix slots, and the bytes of a page and a state over all shards."""
    unit_bytes = slot_unit_bytes(spec, placement.kv_dtype, drafter)
    return PrefixSettings(
        max_slots=cache.prefix_slots,
        memory_bytes=cache.memory,
        min_tokens=cache.min_tokens,
        checkpoint_pages=cache.checkpoint_pages,
        unit_bytes={space: unit_bytes[space] for space in placement.spaces},
    )
