"""Suggests configuration changes that make a placement fit: single changes if one is enough, else the fewest together.

Invariant: a change is suggested only after a plan with it was made and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lucevisor.model.values import Dtype, LayerRange
from lucevisor.placement.dtypes import choose_dtype
from lucevisor.placement.formatting import format_bytes
from lucevisor.placement.ranges import SplitError
from lucevisor.placement.sizer import SizingInputs, most
from lucevisor.placement.sizing import Sizing, compute_sizes, ranges_by_memory

MIN_CHUNK = 64
_Ranges = tuple[LayerRange, ...]
_Change = Callable[[SizingInputs, _Ranges], tuple[SizingInputs, _Ranges]]


@dataclass(frozen=True, slots=True)
class _Suggestion:
    """One change, and how to write its result in the configuration."""

    change: _Change
    written: Callable[[Sizing, SizingInputs], str]


def advise(inputs: SizingInputs, ranges: Sequence[LayerRange], sizing: Sizing) -> tuple[str, ...]:
    """Return changes that make ``inputs``, which do not fit, fit; a last resort if none was found."""
    ranges = tuple(ranges)
    suggestions = list(_suggestions(inputs))
    out = []
    for suggestion in suggestions:
        tried, result = _try(inputs, ranges, [suggestion])
        if result is not None and result.fits:
            out.append(f"it fits with {suggestion.written(result, tried)}")
    return tuple(out) or (_combined(inputs, ranges, suggestions) or _last_resort(sizing),)


def _suggestions(inputs: SizingInputs) -> Iterator[_Suggestion]:
    """Yield changes that may help, the least harmful first."""
    if inputs.draft is not None:
        yield _Suggestion(lambda c, r: (replace(c, draft=None), r), lambda *_: "draft.kind = off")
    yield _Suggestion(lambda c, _: (c, ranges_by_memory(c)), _written_split)
    if inputs.pages is not None:
        yield _Suggestion(lambda c, r: (replace(c, pages=None), r), lambda s, _: f"engine.pages = {s.pools.full_pages}")
    if inputs.max_context is not None:
        yield _Suggestion(
            lambda c, r: (replace(c, max_context=None), r), lambda s, _: f"engine.max_context = {s.max_context}"
        )
    short = _sixteen_bit_format(inputs)
    if inputs.kv_dtype is Dtype.FLOAT32:
        yield _Suggestion(lambda c, r: (replace(c, kv_dtype=short), r), lambda _, c: f"engine.kv_dtype = {c.kv_dtype}")
    if inputs.dtype is Dtype.FLOAT32:
        yield _Suggestion(
            lambda c, r: (replace(c, dtype=short, kv_dtype=short), r), lambda _, c: f"engine.dtype = {c.dtype}"
        )
    if inputs.prefill_chunk > MIN_CHUNK:
        yield _Suggestion(_smaller_chunk, lambda _, c: f"engine.prefill_chunk = {c.prefill_chunk}")
    if inputs.max_sequences > 1:
        yield _Suggestion(_fewer_sequences, lambda _, c: f"engine.max_sequences = {c.max_sequences}")


def _written_split(sizing: Sizing, _: SizingInputs) -> str:
    ranges = ", ".join(f'"{shard.layers.start}-{shard.layers.stop}"' for shard in sizing.shards)
    return f"placement.target_layer_split = [{ranges}]"


def _sixteen_bit_format(inputs: SizingInputs) -> Dtype:
    chosen = choose_dtype("auto", inputs.targets).dtype
    return Dtype.BFLOAT16 if chosen is Dtype.FLOAT32 else chosen


def _smaller_chunk(inputs: SizingInputs, ranges: _Ranges) -> tuple[SizingInputs, _Ranges]:
    """Halve the chunk until it fits, down to MIN_CHUNK."""
    chunk = inputs.prefill_chunk
    while chunk > MIN_CHUNK:
        chunk = max(MIN_CHUNK, chunk // 2)
        if compute_sizes(replace(inputs, prefill_chunk=chunk), ranges).fits:
            break
    return replace(inputs, prefill_chunk=chunk), ranges


def _fewer_sequences(inputs: SizingInputs, ranges: _Ranges) -> tuple[SizingInputs, _Ranges]:
    """Take as many sequences as fit, at least one."""

    def fits(n: int) -> bool:
        return n == 0 or compute_sizes(replace(inputs, max_sequences=n), ranges).fits

    return replace(inputs, max_sequences=max(1, most(inputs.max_sequences - 1, fits))), ranges


def _try(
    inputs: SizingInputs, ranges: _Ranges, suggestions: Sequence[_Suggestion]
) -> tuple[SizingInputs, Sizing | None]:
    try:
        for suggestion in suggestions:
            inputs, ranges = suggestion.change(inputs, ranges)
    except SplitError:
        return inputs, None
    return inputs, compute_sizes(inputs, ranges)


def _combined(inputs: SizingInputs, ranges: _Ranges, suggestions: Sequence[_Suggestion]) -> str | None:
    """Return the shortest run of changes that fits; ranges are chosen last so that they suit the other changes."""
    split, *others = suggestions
    for n in range(1, len(others) + 1):
        for chosen in ([*others[:n]], [*others[:n], split]):
            tried, result = _try(inputs, ranges, chosen)
            if result is not None and result.fits:
                return (
                    f"it fits with {' and '.join(suggestion.written(result, tried) for suggestion in chosen)} together"
                )
    return None


def _last_resort(sizing: Sizing) -> str:
    weights = format_bytes(sum(use.weight_bytes for use in sizing.uses))
    return (
        f"no split or setting makes it fit: the weights alone take {weights}; use a smaller quant of the model, or add "
        "a device to placement.target_devices"
    )
