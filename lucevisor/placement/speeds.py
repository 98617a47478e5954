"""Speeds of the devices for a model: what to measure, under which conditions, and the time of a layer range.

A *unit* is the layers between two neighbouring legal boundaries, usually one; of those with the same tensors, types and
state one is timed.  Speeds are used only under the conditions they were measured under.
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
from lucevisor.placement.devices import (
    Inventory,
    TargetDevice,
    choose_dtype,
    choose_kv_dtype,
    order_is_free,
    target_devices,
)
from lucevisor.placement.split import legal_boundaries
from lucevisor.protocol.messages import Span, Timing

PROMPT_TOKENS = 512
ANSWER_TOKENS = 256
"""The reference request that is timed: prompt tokens, and tokens generated one at a time."""


class MeasurementConditions(msgspec.Struct, frozen=True):
    """Everything that measured times depend on.  ``model``: a hash; ``targets``: a line per device, in layer order."""

    model: str
    targets: list[str]
    dtype: Dtype
    kv_dtype: Dtype
    n_rows: int
    version: str

    def key(self) -> str:
        return sha256(msgspec.json.encode(self)).hexdigest()[:32]


class Speeds(msgspec.Struct, frozen=True):
    """Measured times.  ``targets[i]``: kind of unit -> its Timing on device i, for every kind that can lie there.

    The ``end_`` times are of the head on the first target and of the tail on the last.
    """

    conditions: MeasurementConditions
    measured: str
    targets: list[dict[str, Timing]]

    def valid(self) -> bool:
        timings = [timing for target in self.targets for timing in target.values()]
        times = (s for t in timings for s in (t.decode_s, t.prefill_s, t.end_decode_s, t.end_prefill_s))
        return len(self.targets) == len(self.conditions.targets) and all(isfinite(s) and s >= 0 for s in times)


@dataclass(frozen=True, slots=True)
class MeasurementRequest:
    """Layers to time: ``spans[i]`` maps each kind of unit to the layers to time on target i."""

    conditions: MeasurementConditions
    spans: tuple[Mapping[str, Span], ...]

    def to_speeds(self, targets: Sequence[Sequence[Timing]], measured: str) -> Speeds:
        """Return the speeds from the timings of each target's spans.  Raises ValueError if any is missing."""
        timings_by_target = []
        for spans, timings in zip(self.spans, targets, strict=True):
            ends = timings[0] if timings else None  # embedding and output are timed with the first span
            timings_by_target.append(
                {
                    kind: Timing(t.decode_s, t.prefill_s, ends.end_decode_s, ends.end_prefill_s)
                    for kind, t in zip(spans, timings, strict=True)
                    if ends is not None
                }
            )
        return Speeds(self.conditions, measured, timings_by_target)


def measurement_request(
    spec: ModelSpec, config: Config, inventory: Inventory, threads: Mapping[str, int], version: str
) -> MeasurementRequest | None:
    """Return what to measure for the split of ``config``; None if there is nothing to choose.  Raises PlacementError.

    ``threads``: of each cpu group.
    """
    devices = config.placement.devices
    if not isinstance(config.placement.split, Auto) or not 1 < len(devices) <= len(units_of(spec)):
        return None
    if any(device.group not in inventory for device in devices):
        return None
    targets = target_devices(config, inventory)
    dtype = choose_dtype(config.engine.dtype, targets).dtype
    kv_dtype = choose_kv_dtype(config.engine.kv_dtype, dtype).dtype
    n_rows = max(1, min(PROMPT_TOKENS, config.engine.usual_chunk, spec.context_tokens - 1))
    anywhere = order_is_free(config, targets)
    lines = [_device_line(target, config, threads) + ", anywhere" * anywhere for target in targets]
    conditions = MeasurementConditions(model_key(spec), lines, dtype, kv_dtype, n_rows, version)
    return MeasurementRequest(conditions, _spans(spec, targets, anywhere=anywhere))


def units_of(spec: ModelSpec) -> tuple[LayerRange, ...]:
    boundaries = [0, *legal_boundaries(spec.n_layers, spec.legal_boundary), spec.n_layers]
    return tuple(LayerRange(a, b) for a, b in pairwise(boundaries))


def kinds_of(spec: ModelSpec) -> tuple[str, ...]:
    return tuple(
        _digest([_layer_facts(spec, layer, unit.start) for layer in spec.layers[unit.start : unit.stop]])[:12]
        for unit in units_of(spec)
    )


def model_key(spec: ModelSpec) -> str:
    """Return a hash of all that decides a model's speed."""
    ends = [
        _tensor_facts(spec, spec.embedding_tensors),
        _tensor_facts(spec, spec.output_tensors),
        _tensor_facts(spec, spec.shared_tensors),
    ]
    decisions = (spec.architecture, repr(spec.params), spec.hidden_size, spec.vocabulary, ends, kinds_of(spec))
    return _digest(decisions)[:32]


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Predicts the time of layer ranges.  ``starts[u]``: first layer of unit u.

    ``order``: the measured target of each shard, where hosts may be in any order.
    """

    speeds: Speeds
    kinds: tuple[str, ...]
    starts: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @classmethod
    def of(cls, spec: ModelSpec, speeds: Speeds) -> SpeedModel:
        return cls(speeds, kinds_of(spec), tuple(unit.start for unit in units_of(spec)))

    def seconds(self, target: int, layers: LayerRange) -> tuple[float, float]:
        """Return the seconds that ``layers`` take on a target for one token, and for ``n_rows``."""
        timings = self.speeds.targets[target if self.order is None else self.order[target]]
        units = [timings[k] for k, s in zip(self.kinds, self.starts, strict=True) if layers.start <= s < layers.stop]
        # Targets that may be anywhere were all measured with the output, which only the last one has.
        has_end = self.order is None or target == len(self.order) - 1
        return (
            sum(t.decode_s for t in units) + units[0].end_decode_s * has_end,
            sum(t.prefill_s for t in units) + units[0].end_prefill_s * has_end,
        )

    def request_s(self, target: int, layers: LayerRange) -> float:
        decode_s, prefill_s = self.seconds(target, layers)
        return prefill_s * PROMPT_TOKENS / self.speeds.conditions.n_rows + decode_s * ANSWER_TOKENS


def _spans(spec: ModelSpec, targets: Sequence[TargetDevice], *, anywhere: bool) -> tuple[dict[str, Span], ...]:
    """Return for each target one unit of each kind that it can hold; with ``anywhere`` any, also as the last."""
    units, kinds = units_of(spec), kinds_of(spec)
    out: list[dict[str, Span]] = []
    for i, target in enumerate(targets):
        first, last = i == 0 and not anywhere, i == len(targets) - 1 or anywhere
        index = 0 if target.backend is Backend.CPU else target.device.index
        spans: dict[str, Span] = {}
        for unit in range(len(units)) if anywhere else range(i, len(units) - len(targets) + i + 1):
            ends = not spans
            spans.setdefault(kinds[unit], Span(index, units[unit], first and ends, last and ends))
        out.append(spans)
    return tuple(out)


def _device_line(target: TargetDevice, config: Config, threads: Mapping[str, int]) -> str:
    name = target.info.name if target.info is not None else ""
    group = config.groups[target.device.group]
    how = f", {threads.get(group.name, 0)} threads" if target.backend is Backend.CPU else ""
    pinned = f", cores {','.join(map(str, group.cores))}" if group.cores else ""
    return f"{target.device} {target.backend} {name}{how}{pinned}"


def _layer_facts(spec: ModelSpec, layer: LayerSpec, start: int) -> object:
    shared = None if layer.shares_with is None else layer.shares_with - start
    state = [(t.name, t.shape, t.dtype) for t in layer.state]
    parts = [(name, part.shape, _type(spec, name)) for name, part in layer.parts.items()]
    own = f"blk.{layer.index}."
    tensors = sorted((name.replace(own, ""), *decisions) for name, *decisions in _tensor_facts(spec, layer.tensors))
    return (layer.kv_group.value, layer.window, layer.n_routed, shared, state, parts, tensors)


def _tensor_facts(spec: ModelSpec, tensors: Mapping[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, shape, _type(spec, name)) for name, shape in tensors.items()]


def _type(spec: ModelSpec, name: str) -> str:
    return spec.files.tensors[name].kind.name if name in spec.files.tensors else ""


def _digest(decisions: object) -> str:
    return sha256(ascii(decisions).encode("ascii")).hexdigest()
