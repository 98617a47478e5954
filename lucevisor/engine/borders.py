"""Where a prompt is cut, beside the multiples of the chunk size, so that its states can be remembered there.

Pure.  Invariant: the places depend on the prompt and the settings alone, never on what is remembered, so a prompt is
cut at the same places whether or not it is computed from its start: cache on, off, cold and warm give equal slices.
"""

from __future__ import annotations

from collections.abc import Sequence

from lucevisor.memory.blocks import Origin
from lucevisor.memory.prefix import PrefixSettings
from lucevisor.wire.values import PAGE_TOKENS

_LAST_TURNS = 2


def borders(n_prompt: int, turns: Sequence[int], settings: PrefixSettings, *, recurrent: bool) -> dict[int, Origin]:
    """Return the positions at which a prompt of ``n_prompt`` tokens is remembered, ascending, and why.

    By worth: the end of the last chat turn, where the next prompt of a conversation will go on; of the first one, the
    system prompt; of the turn before the last, for when the last is asked again in other words.  Without turns, of a
    model with recurrent layers: the last multiple of ``checkpoint_pages``, for when the same prompt comes again.  Then
    the prompt's end.  A page apart from each other at least, and none before ``min_tokens``.
    """
    inside = [turn for turn in turns if turn <= n_prompt]
    places: list[tuple[int, Origin]] = [(turn, "turn") for turn in (*inside[-1:], *inside[:1], *inside[-_LAST_TURNS:])]
    step = settings.checkpoint_pages * PAGE_TOKENS
    if recurrent and step and not inside:
        places.append(((n_prompt - 1) // step * step, "pages"))
    places.append((n_prompt, "prompt"))
    chosen: dict[int, Origin] = {}
    for position, origin in places:
        far = all(abs(position - other) >= PAGE_TOKENS for other in chosen)
        if far and position >= max(1, settings.min_tokens):
            chosen[position] = origin
    return dict(sorted(chosen.items()))
