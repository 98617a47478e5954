"""Derives the engine's limits from a placement: rows, sequences, pages, prefix slots.  Pure."""

from __future__ import annotations

from lucevisor.config import CacheConfig
from lucevisor.engine.limits import EngineLimits
from lucevisor.kv.prefix_records import PrefixSettings
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import LayerRange
from lucevisor.placement.result import Placement


def engine_limits(cache: CacheConfig, spec: ModelSpec, placement: Placement) -> EngineLimits:
    """SupervisionLimits of the engine that runs ``placement``."""
    return EngineLimits(
        max_sequences=placement.max_sequences,
        max_context=placement.max_context,
        prefill_chunk=placement.prefill_chunk,
        max_step_tokens=placement.max_step_tokens,
        spaces=placement.spaces,
        pools=placement.pools,
        window_tokens=placement.window_tokens,
        prefix=_prefix_settings(cache, spec, placement),
    )


def _prefix_settings(cache: CacheConfig, spec: ModelSpec, placement: Placement) -> PrefixSettings:
    """Return the bounds of prefix slots, and the bytes of a page and a state over all shards."""
    every = LayerRange(0, spec.n_layers)
    return PrefixSettings(
        max_slots=cache.prefix_slots,
        memory_bytes=cache.memory,
        min_tokens=cache.min_tokens,
        checkpoint_pages=cache.checkpoint_pages,
        unit_bytes={space: spec.unit_bytes(space, every, placement.kv_dtype) for space in placement.spaces},
    )
