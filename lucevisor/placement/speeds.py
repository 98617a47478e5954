"""How fast the devices run the layers of a model: what to measure, what it depends on, and what a shard then takes.

Pure: measuring, and keeping what was measured, is the caller's.  Between two neighbouring places where the chain may
be cut lies a *unit* of layers that stay together, mostly one layer; units with the same tensors, types and state are of
one kind, and one of each kind is timed.  Invariant: speeds are used only under the conditions they were measured under.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from math import isfinite

import msgspec

from lucevisor.config import Auto, Config
from lucevisor.model.spec import LayerSpec, ModelSpec
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.placement.devices import Inventory, Seat, seats_of
from lucevisor.placement.formats import choose_dtype, choose_kv_dtype
from lucevisor.placement.ranges import legal_places
from lucevisor.protocol.checks import Span, Timing

PROMPT_TOKENS = 512
ANSWER_TOKENS = 256
"""The request whose time counts: a prompt of so many tokens and an answer of so many, one at a time."""


class Conditions(msgspec.Struct, frozen=True):
    """All that measured times depend on.  ``model``: hash of architecture, shapes and types; ``seats``: a line a
    device, in layer order; ``version``: of this program.
    """

    model: str
    seats: list[str]
    dtype: Dtype
    kv_dtype: Dtype
    n_rows: int
    version: str

    def key(self) -> str:
        """32 hex digits, different for different conditions."""
        return sha256(msgspec.json.encode(self)).hexdigest()[:32]


class Speeds(msgspec.Struct, frozen=True):
    """What was measured.  ``seats[i]``: kind of unit -> its Timing on device i, for every kind that can lie there.

    The ``end_`` times of a seat's Timings, of the head on the first and of the tail on the last, are the same in all
    of them.  ``measured``: when, such as "2026-11-21 12:00 UTC".
    """

    conditions: Conditions
    measured: str
    seats: list[dict[str, Timing]]

    def valid(self) -> bool:
        """Whether all times are such as a clock can give."""
        times = (t for seat in self.seats for timing in seat.values() for t in _numbers(timing))
        return len(self.seats) == len(self.conditions.seats) and all(isfinite(t) and t >= 0 for t in times)


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure: ``spans[i]`` maps a kind to the layers that stand for it on seat i."""

    conditions: Conditions
    spans: tuple[Mapping[str, Span], ...]

    def answered(self, seats: Sequence[Sequence[Timing]], measured: str) -> Speeds:
        """The speeds, from the timings of each seat's spans in order.  Raises ValueError when some are missing."""
        found = []
        for spans, timings in zip(self.spans, seats, strict=True):
            ends = timings[0] if timings else None  # head and tail are timed with the first span
            found.append(
                {
                    kind: Timing(t.decode_s, t.prefill_s, ends.end_decode_s, ends.end_prefill_s)
                    for kind, t in zip(spans, timings, strict=True)
                    if ends is not None
                }
            )
        return Speeds(self.conditions, measured, found)


def request_of(
    spec: ModelSpec, config: Config, inventory: Inventory, threads: Mapping[str, int], version: str
) -> Request | None:
    """What must be known to choose the split of ``config`` by speed; None when there is nothing to choose.

    ``inventory`` must have every group; ``threads``: compute threads of each cpu group.  Raises PlacementError as
    ``plan`` does.
    """
    devices = config.placement.devices
    if not isinstance(config.placement.split, Auto) or not 1 < len(devices) <= len(units_of(spec)):
        return None
    if any(device.group not in inventory for device in devices):
        return None
    seats = seats_of(config, inventory)
    dtype = choose_dtype(config.engine.dtype, seats).dtype
    kv_dtype = choose_kv_dtype(config.engine.kv_dtype, dtype).dtype
    n_rows = max(1, min(PROMPT_TOKENS, config.engine.prefill_chunk, spec.context_tokens - 1))
    lines = [_seat_line(seat, config, threads) for seat in seats]
    conditions = Conditions(model_key(spec), lines, dtype, kv_dtype, n_rows, version)
    return Request(conditions, _spans(spec, seats))


def units_of(spec: ModelSpec) -> tuple[LayerRange, ...]:
    """The layers between neighbouring places where the chain may be cut, in order."""
    places = [0, *legal_places(spec.n_layers, spec.legal_boundary), spec.n_layers]
    return tuple(LayerRange(a, b) for a, b in pairwise(places))


def kinds_of(spec: ModelSpec) -> tuple[str, ...]:
    """The kind of each unit: 12 hex digits."""
    return tuple(_digest(_unit_facts(spec, unit))[:12] for unit in units_of(spec))


def model_key(spec: ModelSpec) -> str:
    """32 hex digits over architecture, hyperparameters and every layer's shapes and types: what decides its speed."""
    ends = [
        _tensor_facts(spec, spec.embedding_tensors),
        _tensor_facts(spec, spec.output_tensors),
        _tensor_facts(spec, spec.shared_tensors),
    ]
    facts = (spec.architecture, repr(spec.params), spec.hidden_size, spec.vocabulary, ends, kinds_of(spec))
    return _digest(facts)[:32]


@dataclass(frozen=True, slots=True)
class Clock:
    """Speeds of a model's units, added up for ranges.  ``starts[u]`` is the first layer of unit u."""

    speeds: Speeds
    kinds: tuple[str, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, spec: ModelSpec, speeds: Speeds) -> Clock:
        """Raises KeyError when the speeds are of another model."""
        clock = cls(speeds, kinds_of(spec), tuple(unit.start for unit in units_of(spec)))
        n_seats, n_units = len(speeds.seats), len(clock.kinds)
        for i, seat in enumerate(speeds.seats):
            missing = {clock.kinds[unit] for unit in _possible_units(i, n_seats, n_units)} - set(seat)
            if missing:
                raise KeyError(f"seat {i} has no times for units of the kinds {', '.join(sorted(missing))}")
        return clock

    def seconds(self, seat: int, layers: LayerRange) -> tuple[float, float]:
        """Seconds that seat number ``seat`` takes for one token, and for ``n_rows``, through ``layers``."""
        timings = self.speeds.seats[seat]
        units = [timings[k] for k, s in zip(self.kinds, self.starts, strict=True) if layers.start <= s < layers.stop]
        return (
            sum(t.decode_s for t in units) + units[0].end_decode_s,
            sum(t.prefill_s for t in units) + units[0].end_prefill_s,
        )

    def work_s(self, seat: int, layers: LayerRange) -> float:
        """Seconds of a seat for the request that counts: PROMPT_TOKENS of prompt, ANSWER_TOKENS of answer."""
        decode_s, prefill_s = self.seconds(seat, layers)
        return prefill_s * PROMPT_TOKENS / self.speeds.conditions.n_rows + decode_s * ANSWER_TOKENS


def _spans(spec: ModelSpec, seats: Sequence[Seat]) -> tuple[dict[str, Span], ...]:
    """For each seat one unit of each kind that it can hold; each seat in front of it and behind it has one at least."""
    units, kinds = units_of(spec), kinds_of(spec)
    out: list[dict[str, Span]] = []
    for i, seat in enumerate(seats):
        first, last = i == 0, i == len(seats) - 1
        index = 0 if seat.backend is Backend.CPU else seat.device.index
        spans: dict[str, Span] = {}
        for unit in _possible_units(i, len(seats), len(units)):
            ends = not spans
            spans.setdefault(kinds[unit], Span(index, units[unit], first and ends, last and ends))
        out.append(spans)
    return tuple(out)


def _possible_units(seat: int, n_seats: int, n_units: int) -> range:
    return range(seat, n_units - n_seats + seat + 1)


def _seat_line(seat: Seat, config: Config, threads: Mapping[str, int]) -> str:
    name = seat.info.name if seat.info is not None else ""
    group = config.groups[seat.device.group]
    how = f", {threads.get(group.name, 0)} threads" if seat.backend is Backend.CPU else ""
    pinned = f", cores {','.join(map(str, group.cores))}" if group.cores else ""
    return f"{seat.device} {seat.backend} {name}{how}{pinned}"


def _unit_facts(spec: ModelSpec, unit: LayerRange) -> list[object]:
    return [_layer_facts(spec, spec.layers[i], unit.start) for i in range(unit.start, unit.stop)]


def _layer_facts(spec: ModelSpec, layer: LayerSpec, start: int) -> object:
    shared = None if layer.shares_with is None else layer.shares_with - start
    state = [(t.name, t.shape, t.dtype) for t in layer.state]
    parts = [(name, part.shape, _type(spec, name)) for name, part in layer.parts.items()]
    own = f"blk.{layer.index}."
    tensors = sorted((name.replace(own, ""), *facts) for name, *facts in _tensor_facts(spec, layer.tensors))
    return (layer.space.value, layer.window, layer.n_routed, shared, state, parts, tensors)


def _tensor_facts(spec: ModelSpec, tensors: Mapping[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, shape, _type(spec, name)) for name, shape in tensors.items()]


def _type(spec: ModelSpec, name: str) -> str:
    return spec.files.tensors[name].kind.name if spec.files is not None and name in spec.files.tensors else ""


def _numbers(timing: Timing) -> tuple[float, ...]:
    return timing.decode_s, timing.prefill_s, timing.end_decode_s, timing.end_prefill_s


def _digest(facts: object) -> str:
    return sha256(ascii(facts).encode("ascii")).hexdigest()
