"""Structured values of configuration keys, and the value types that parse them.

Knows nothing about the file or the machine. Invariant: a value is well-formed by itself; `resolve` checks it against
other settings, the placement planner against the model.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lucevisor.config.strict import (
    AUTO,
    Refused,
    Text,
    ValueType,
    check_length,
    choose,
    decimal_of,
    kind_of,
    nearest,
    split_list,
)
from lucevisor.errors import format_error

BACKENDS: Final = ("cpu", "cuda", "hip")
GROUP_NAME: Final = re.compile(r"[a-z0-9_-]{1,32}", re.ASCII)
HUB_PREFIX: Final = "hf:"

_DEVICE = re.compile(r"([a-z0-9_-]{1,32}):(0|[1-9][0-9]{0,2})", re.ASCII)
_RANGE = re.compile(r"(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,5})", re.ASCII)
_RESTARTS = re.compile(r"(0|[1-9][0-9]{0,3})/([1-9][0-9]{0,5})s", re.ASCII)
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A warning at start: a key, its value, why, and what to do."""

    key: str
    value: object
    why: str
    hint: str = ""

    def __str__(self) -> str:
        return format_error(self.key, self.value, self.why, self.hint)


@dataclass(frozen=True, slots=True)
class DeviceRef:
    """One device of one backend group; index 0 is the first device that the group's interpreter sees."""

    group: str
    index: int

    def __str__(self) -> str:
        return f"{self.group}:{self.index}"


@dataclass(frozen=True, slots=True)
class WeightedSplit:
    """Share of the layers for each device: finite, above 0, with a finite sum."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Half-open layer range `(start, stop)` per device: starting at 0, contiguous, none empty."""

    values: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Auto:
    """The planner chooses the layer ranges."""


Split = WeightedSplit | Ranges | Auto


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file in a Hugging Face hub repository."""

    owner: str
    repo: str
    file: str

    @property
    def repo_id(self) -> str:
        """`owner/repo`, as huggingface_hub expects it."""
        return f"{self.owner}/{self.repo}"


@dataclass(frozen=True, slots=True)
class RestartLimit:
    """At most `count` restarts of one group in any `seconds`; one more and the group is FAILED."""

    count: int
    seconds: int

    def __str__(self) -> str:
        return f"{self.count}/{self.seconds}s"


def hub_file(text: str) -> HubFile:
    """Parse `hf:owner/repo/file`, where file may contain directories; raises Refused."""
    owner, _, rest = text.removeprefix(HUB_PREFIX).partition("/")
    repo, _, file = rest.partition("/")
    names_good = all(_HUB_NAME.fullmatch(name) for name in (owner, repo))
    if not names_good or any(part in ("", ".", "..") for part in file.split("/")):
        raise Refused("is not a file of the hub", "write hf:owner/repo/file.gguf", value=text)
    return HubFile(owner, repo, file)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


@dataclass(frozen=True, slots=True)
class DeviceName(ValueType[DeviceRef]):
    """`NAME:INDEX`; the name is resolved to a group later."""

    wants: ClassVar[str] = "GROUP:INDEX"

    def from_toml(self, value: object) -> DeviceRef:
        if isinstance(value, str):
            return self.from_text(value)
        raise self.mistyped(value)

    def from_text(self, text: str) -> DeviceRef:
        match = _DEVICE.fullmatch(text)
        if match is None:
            raise Refused("is not GROUP:INDEX", self._hint(text), value=text)
        return DeviceRef(match[1], int(match[2]))

    def _hint(self, text: str) -> str:
        """Return a hint with the device most likely meant by `cuda:01`, `CUDA: 1` or `cuda`."""
        name, colon, index = "".join(text[:64].lower().split()).partition(":")
        digits = index.removeprefix("+").lstrip("0") or "0"
        near = f"{name}:{digits if colon else 0}"
        return f"nearest: {near}" if _DEVICE.fullmatch(near) else "such as cuda:0; an index is decimal digits, 0 to 999"

    def write(self, value: DeviceRef) -> object:
        return str(value)

    def allowed(self) -> str:
        return "`GROUP:INDEX`, or `BACKEND:INDEX` where one group has that backend"


@dataclass(frozen=True, slots=True)
class MaybeDevice(ValueType[DeviceRef | None]):
    """A device, or empty text for none."""

    wants: ClassVar[str] = "GROUP:INDEX"

    def from_toml(self, value: object) -> DeviceRef | None:
        return None if value == "" else DeviceName().from_toml(value)

    def from_text(self, text: str) -> DeviceRef | None:
        return None if text == "" else DeviceName().from_text(text)

    def write(self, value: DeviceRef | None) -> object:
        return "" if value is None else str(value)

    def allowed(self) -> str:
        return "`GROUP:INDEX`, or empty"


@dataclass(frozen=True, slots=True)
class LayerSplit(ValueType[Split]):
    """`auto`, weights, or half-open layer ranges `START-STOP`."""

    wants: ClassVar[str] = "auto, weights or layer ranges"

    def from_toml(self, value: object) -> Split:
        if isinstance(value, str):
            if value == AUTO:
                return Auto()
            near = choose(value, [AUTO]) if nearest(value, [AUTO]) else 'such as [0.5, 0.5] or ["0-4", "4-8"]'
            raise Refused("is not auto, weights or layer ranges", near, value=value)
        if not isinstance(value, list):
            raise self.mistyped(value)
        if not value:
            raise Refused("is empty", 'write one weight or range for each target device, or "auto"', value=[])
        check_length(value)
        if all(isinstance(item, str) for item in value):
            return _ranges(value)
        return _weights([_number(item, index) for index, item in enumerate(value)])

    def from_text(self, text: str) -> Split:
        if text == AUTO:
            return Auto()
        parts = split_list(text)
        check_length(parts)
        if any(_RANGE.fullmatch(part) for part in parts):
            return _ranges(parts)
        return _weights([_number(Text(part), index) for index, part in enumerate(parts)])

    def write(self, value: Split) -> object:
        match value:
            case Auto():
                return AUTO
            case WeightedSplit(values=weights):
                return list(weights)
            case Ranges(values=ranges):
                return [f"{start}-{stop}" for start, stop in ranges]

    def allowed(self) -> str:
        return '`"auto"`, one weight > 0 per device, or one half-open range `"START-STOP"` per device'


def _number(item: object, index: int) -> float:
    """Return one weight as a float; raises Refused with its index."""
    try:
        if isinstance(item, Text):
            return decimal_of(item)
        if isinstance(item, bool) or not isinstance(item, int | float):
            raise Refused(f"is {kind_of(item)}, not a number", "write all weights as numbers, or all ranges as text")
        return float(item)
    except Refused as refused:
        raise Refused(refused.why, refused.hint, value=item, inside=f"[{index}]") from None
    except OverflowError:
        return float("inf")


def _weights(values: Sequence[float]) -> WeightedSplit:
    for index, weight in enumerate(values):
        if not 0 < weight < float("inf"):  # false for nan too
            raise Refused(
                "is not a finite number above 0", "write weights such as 0.5", value=weight, inside=f"[{index}]"
            )
    if sum(values) == float("inf"):
        raise Refused("has a sum that is not finite", "write smaller weights", value=list(values))
    return WeightedSplit(tuple(values))


def _ranges(parts: Sequence[str]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    previous_stop = 0
    for index, part in enumerate(parts):
        match = _RANGE.fullmatch(part)
        if match is None:
            hint = 'write all ranges as "START-STOP", such as "0-4", or all weights as numbers'
            raise Refused("is not a layer range", hint, value=part, inside=f"[{index}]")
        start, stop = int(match[1]), int(match[2])
        if start != previous_stop:
            near = f"nearest: {previous_stop}-{max(stop, previous_stop + 1)}"
            raise Refused(
                f"does not start at layer {previous_stop}, where the previous range ends",
                near,
                value=part,
                inside=f"[{index}]",
            )
        if stop <= start:
            why = "is empty: START-STOP is the layers from START up to, but not including, STOP"
            raise Refused(why, f"nearest: {start}-{start + 1}", value=part, inside=f"[{index}]")
        ranges.append((start, stop))
        previous_stop = stop
    return Ranges(tuple(ranges))


@dataclass(frozen=True, slots=True)
class Restarts(ValueType[RestartLimit]):
    """`COUNT/SECONDSs`."""

    wants: ClassVar[str] = "COUNT/SECONDSs"

    def from_toml(self, value: object) -> RestartLimit:
        if isinstance(value, str):
            return self.from_text(value)
        raise self.mistyped(value)

    def from_text(self, text: str) -> RestartLimit:
        match = _RESTARTS.fullmatch(text)
        if match is None:
            raise Refused("is not COUNT/SECONDSs", "such as 5/60s: at most 5 restarts in any 60 seconds", value=text)
        return RestartLimit(int(match[1]), int(match[2]))

    def write(self, value: RestartLimit) -> object:
        return str(value)

    def allowed(self) -> str:
        return "`COUNT/SECONDSs`, such as `5/60s`; count 0..9999, seconds 1..999999"
