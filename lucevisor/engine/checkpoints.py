"""Where a prompt is cut, beside the multiples of the chunk size, so that its states can be remembered there.

Pure.  Invariant: the places depend on the prompt and the settings alone, never on what is remembered, so a prompt is
cut at the same places whether or not it is computed from its start: cache on, off, cold and warm give equal slices.
"""

from __future__ import annotations

from collections.abc import Sequence

from lucevisor.kv.prefix_records import PrefixSettings
from lucevisor.kv.prefix_tree import Origin
from lucevisor.model.values import PAGE_TOKENS


def find_checkpoints(
    n_prompt: int, turns: Sequence[int], settings: PrefixSettings, *, block_granular: bool
) -> dict[int, Origin]:
    """Return the positions at which a prompt of ``n_prompt`` tokens is remembered, ascending, and why.

    The end of the last chat turn, where the next prompt of a conversation goes on, and of the first one, the system
    prompt.  Then, if a page away from the others: the turn before the last, for when the last is asked again in other
    words; without turns, and unless the cache is ``block_granular`` (a prompt can start at any cached page), the last
    multiple of ``checkpoint_pages``, for when the same prompt comes again; the prompt's end.  None is before
    ``min_tokens``.
    """
    inside = [turn for turn in turns if turn < n_prompt]
    chosen: dict[int, Origin] = dict.fromkeys((*inside[:1], *inside[-1:]), "turn")
    others: list[tuple[int, Origin]] = [(turn, "turn") for turn in inside[-2:-1]]
    step = settings.checkpoint_pages * PAGE_TOKENS
    if not block_granular and step and not inside:
        others.append(((n_prompt - 1) // step * step, "pages"))
    others.append((n_prompt, "prompt"))
    for position, origin in others:
        if all(abs(position - other) >= PAGE_TOKENS for other in chosen):
            chosen[position] = origin
    return {n: chosen[n] for n in sorted(chosen) if n >= max(1, settings.min_tokens)}
