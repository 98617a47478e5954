"""The automatic prefill chunk: long where GPUs alone compute and have the memory for it.

On a GPU a step of 512 tokens dequantises as many weights as one of 2,048 and launches as many kernels, so long chunks
compute prompts faster; on a cpu they only take longer each.  Which chunks a prompt gets beside others is the engine's
choice (engine/scheduling/chunking.py).  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lucevisor.model.pages import max_resident_chunk
from lucevisor.model.values import Backend, LayerRange
from lucevisor.placement.devices import memories_of
from lucevisor.placement.sizer import SizingInputs
from lucevisor.placement.sizing import Sizing, compute_sizes

LONG_CHUNKS: Final = (2048, 1024)

MAX_SHARE: Final = 0.1
"""Of the pages and of the context, what the workspace of longer steps may take."""


def choose_chunk(inputs: SizingInputs, ranges: Sequence[LayerRange]) -> tuple[SizingInputs, Sizing]:
    """Return the inputs with the longest chunk that leaves pages, context and slots, and their sizes.

    ``inputs`` have the usual one, which stays where a device is a cpu or a memory is unknown.
    """
    usual = compute_sizes(inputs, ranges)
    memories = memories_of(inputs.all_targets).values()
    known = all(memory.usable_bytes is not None for memory in memories)
    if known and usual.fits and not any(target.backend is Backend.CPU for target in inputs.targets):
        most = max(LONG_CHUNKS) if inputs.pool_pages is None else max_resident_chunk(inputs.pool_pages)
        for chunk in (chunk for chunk in LONG_CHUNKS if chunk <= most):
            longer_inputs = replace(inputs, prefill_chunk=chunk)
            longer = compute_sizes(longer_inputs, ranges)
            if longer.fits and _leaves_enough(longer, usual):
                return longer_inputs, longer
    return inputs, usual


def _leaves_enough(longer: Sizing, usual: Sizing) -> bool:
    least = 1 - MAX_SHARE
    return (
        longer.n_slots == usual.n_slots
        and longer.n_draft_states >= least * usual.n_draft_states
        and longer.max_context >= least * usual.max_context
        and longer.pools.full_pages >= least * usual.pools.full_pages
    )
