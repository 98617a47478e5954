"""Sizes that a later deployment must share with the one whose engine it takes over: ids of pages and states stay valid.

Pure.
"""

from __future__ import annotations

from dataclasses import replace

from lucevisor.config import Config
from lucevisor.placement.result import Infeasible, Placement

_SHARED = (
    "dtype", "kv_dtype", "max_context", "max_sequences", "prefill_chunk", "max_step_tokens", "pools", "pool_pages",
    "drafting",
)  # fmt: skip


def with_sizes(config: Config, sizes: Placement | None) -> Config:
    """Return ``config`` with what is automatic in its engine as it was chosen for ``sizes``, if given."""
    if sizes is None:
        return config
    engine = replace(
        config.engine,
        dtype=sizes.dtype.value,  # type: ignore[arg-type]  # of those that the key takes
        kv_dtype=sizes.kv_dtype.value,
        max_context=sizes.max_context,
        max_sequences=sizes.max_sequences,
        prefill_chunk=sizes.prefill_chunk,
        pages=sizes.pools.full_pages or config.engine.pages,
    )
    return replace(config, engine=engine)


def why_unfit(placement: Placement | Infeasible, sizes: Placement | None) -> str:
    """Return why a model cannot be placed, or not with these sizes of the running requests; empty if it can."""
    if isinstance(placement, Infeasible):
        return placement.message
    if sizes is None:
        return ""
    other = [name for name in _SHARED if getattr(placement, name) != getattr(sizes, name)]
    if (placement.draft is None) != (sizes.draft is None):
        other.append("draft")
    if not other:
        return ""
    found = ", ".join(f"{name}: {getattr(placement, name)} instead of {getattr(sizes, name)}" for name in other)
    return f"it fits only with other sizes than the running requests have ({found}); `lucevisor stop`, then `start`"
