"""What would make it fit: single changes of the configuration that are enough, else the fewest together.

Every piece of advice was tried: it is only given when the plan that follows it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lucevisor.model.values import Dtype, LayerRange
from lucevisor.placement.amounts import size as amount
from lucevisor.placement.formats import choose_dtype
from lucevisor.placement.ranges import SplitError
from lucevisor.placement.sizing import Case, Sized, automatic_ranges, most, size

LEAST_CHUNK = 64
_Ranges = tuple[LayerRange, ...]
_Change = Callable[[Case, _Ranges], tuple[Case, _Ranges]]


@dataclass(frozen=True, slots=True)
class _Remedy:
    """One change, and how a configuration writes what came of it."""

    change: _Change
    written: Callable[[Sized, Case], str]


def advise(case: Case, ranges: Sequence[LayerRange], sized: Sized) -> tuple[str, ...]:
    """Return what to change so that ``case``, which does not fit, does; a last resort when nothing was found."""
    ranges = tuple(ranges)
    remedies = list(_remedies(case))
    out = []
    for remedy in remedies:
        tried, result = _try(case, ranges, [remedy])
        if result is not None and result.fits:
            out.append(f"it fits with {remedy.written(result, tried)}")
    return tuple(out) or (_together(case, ranges, remedies) or _last_resort(sized),)


def _remedies(case: Case) -> Iterator[_Remedy]:
    """Changes that may help, the least harmful first."""
    yield _Remedy(lambda c, _: (c, automatic_ranges(c)), _written_split)
    if case.pages is not None:
        yield _Remedy(lambda c, r: (replace(c, pages=None), r), lambda s, _: f"engine.pages = {s.pools.full_pages}")
    if case.max_context is not None:
        yield _Remedy(
            lambda c, r: (replace(c, max_context=None), r), lambda s, _: f"engine.max_context = {s.max_context}"
        )
    short = _sixteen_bit_format(case)
    if case.kv_dtype is Dtype.FLOAT32:
        yield _Remedy(lambda c, r: (replace(c, kv_dtype=short), r), lambda _, c: f"engine.kv_dtype = {c.kv_dtype}")
    if case.dtype is Dtype.FLOAT32:
        yield _Remedy(
            lambda c, r: (replace(c, dtype=short, kv_dtype=short), r), lambda _, c: f"engine.dtype = {c.dtype}"
        )
    if case.prefill_chunk > LEAST_CHUNK:
        yield _Remedy(_smaller_chunk, lambda _, c: f"engine.prefill_chunk = {c.prefill_chunk}")
    if case.max_sequences > 1:
        yield _Remedy(_fewer_sequences, lambda _, c: f"engine.max_sequences = {c.max_sequences}")


def _written_split(sized: Sized, _: Case) -> str:
    ranges = ", ".join(f'"{shard.layers.start}-{shard.layers.stop}"' for shard in sized.shards)
    return f"placement.target_layer_split = [{ranges}]"


def _sixteen_bit_format(case: Case) -> Dtype:
    chosen = choose_dtype("auto", case.seats).dtype
    return Dtype.BFLOAT16 if chosen is Dtype.FLOAT32 else chosen


def _smaller_chunk(case: Case, ranges: _Ranges) -> tuple[Case, _Ranges]:
    """The largest half, quarter and so on of the chunk that fits; else the least."""
    chunk = case.prefill_chunk
    while chunk > LEAST_CHUNK:
        chunk = max(LEAST_CHUNK, chunk // 2)
        if size(replace(case, prefill_chunk=chunk), ranges).fits:
            break
    return replace(case, prefill_chunk=chunk), ranges


def _fewer_sequences(case: Case, ranges: _Ranges) -> tuple[Case, _Ranges]:
    """As many sequences as fit; else one."""

    def fits(n: int) -> bool:
        return n == 0 or size(replace(case, max_sequences=n), ranges).fits

    return replace(case, max_sequences=max(1, most(case.max_sequences - 1, fits))), ranges


def _try(case: Case, ranges: _Ranges, remedies: Sequence[_Remedy]) -> tuple[Case, Sized | None]:
    try:
        for remedy in remedies:
            case, ranges = remedy.change(case, ranges)
    except SplitError:
        return case, None
    return case, size(case, ranges)


def _together(case: Case, ranges: _Ranges, remedies: Sequence[_Remedy]) -> str | None:
    """The shortest run of changes that fits, ranges chosen last so that they suit the other changes."""
    split, *others = remedies
    for n in range(1, len(others) + 1):
        for chosen in ([*others[:n]], [*others[:n], split]):
            tried, result = _try(case, ranges, chosen)
            if result is not None and result.fits:
                return f"it fits with {' and '.join(remedy.written(result, tried) for remedy in chosen)} together"
    return None


def _last_resort(sized: Sized) -> str:
    weights = amount(sum(use.weight_bytes for use in sized.uses))
    return (
        f"no split and no setting was found with which it fits: the weights alone take {weights} here; use a smaller "
        "quant of the model, or add a device to placement.target_devices"
    )
