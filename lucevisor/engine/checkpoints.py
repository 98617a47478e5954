"""Chooses the checkpoints of a prompt: positions, beside chunk ends, where a slice ends and a prefix slot is made.

Pure.  Invariant: they depend on the prompt and the settings, never on what is cached, so a prompt has the same slices
whether its start is computed or reused: cache on, off, cold and warm give equal numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from lucevisor.kv.prefix_records import PrefixSettings
from lucevisor.kv.prefix_tree import Origin
from lucevisor.model.values import PAGE_TOKENS


def find_checkpoints(
    n_prompt: int, turns: Sequence[int], settings: PrefixSettings, *, block_granular: bool
) -> dict[int, Origin]:
    """Return the checkpoints of a prompt of ``n_prompt`` tokens, ascending, and why each was chosen.

    The end of the last chat turn, where the next prompt of the conversation continues, and of the first, the system
    prompt.  Then, if at least a page away from the others: the turn before the last, in case the last is rephrased;
    without turns, and unless the cache is ``block_granular`` (a prompt can start at any cached page), the last multiple
    of ``checkpoint_pages``, in case the same prompt comes again; the end of the prompt.  None is before ``min_tokens``.
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
