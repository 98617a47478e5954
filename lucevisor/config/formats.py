"""Values that TOML has no type for, such as sizes, devices and layer splits, and the functions that parse them.

Every function takes what tomllib returned and raises `InvalidValue`, never another exception.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from lucevisor.errors import show, suggest

AUTO: Final = "auto"
BACKENDS: Final = ("cpu", "cuda", "hip")
HUB_PREFIX: Final = "hf:"
MAX_INTEGER: Final = 2**63 - 1
SIZE_UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
GROUP_NAME: Final = re.compile(r"[a-z0-9_-]{1,32}", re.ASCII)

_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_DEVICE = re.compile(r"([a-z0-9_-]{1,32}):(0|[1-9][0-9]{0,2})", re.ASCII)
_HOST_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", re.ASCII)
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,A-Z]+", re.ASCII)
_POINT = re.compile(r"([1-9][0-9]{0,9}):((?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)", re.ASCII)
_RANGE = re.compile(r"(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,5})", re.ASCII)
_RESTARTS = re.compile(r"(0|[1-9][0-9]{0,3})/([1-9][0-9]{0,5})s", re.ASCII)
_SET_BY_SUPERVISOR = frozenset({"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONIOENCODING"})
_SIZE = re.compile(r"(0|[1-9][0-9]{0,39})(KiB|MiB|GiB)?", re.ASCII)
_SIZE_MISSPELT = re.compile(r"([1-9][0-9]*)([kmg])(?:i?b)?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_VISIBLE = re.compile(r"0|[1-9][0-9]{0,2}|[A-Za-z][A-Za-z0-9:/_-]{3,127}", re.ASCII)


class InvalidValue(ValueError):
    """A rejected value: why, what to write instead, and where inside the value (`[1]`, `.NAME`)."""

    def __init__(self, why: str, hint: str = "", *, value: object = None, inside: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint
        self.value = value
        self.inside = inside


@dataclass(frozen=True, slots=True)
class Format:
    """A value's form in the file: parser, writer and description.  On a list it applies to every item."""

    allowed: str
    parse: Callable[[Any], Any]
    write: Callable[[Any], object] = lambda value: value


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


def kind_of(value: object) -> str:
    if isinstance(value, str):
        return "text"
    names = {bool: "true or false", int: "an integer", float: "a number", list: "a list", dict: "a table"}
    return names.get(type(value), f"a {type(value).__name__}")


def wrong_type(value: object, expected: str) -> NoReturn:
    raise InvalidValue(f"is {kind_of(value)}, not {expected}", value=value)


# ---- text, paths and names


def line(value: object, expected: str = "text") -> str:
    """Parse one line of text without control characters or surrounding spaces; it may be empty."""
    if not isinstance(value, str):
        wrong_type(value, expected)
    if value != value.strip():
        raise InvalidValue("has surrounding spaces", f'nearest: "{value.strip()}"')
    if _CONTROL.search(value):
        raise InvalidValue("holds a control character", "write one line of printable text")
    return str(value)


def _filled(value: object) -> str:
    text = line(value)
    if not text:
        raise InvalidValue("is empty", "write a value or remove the key")
    return text


def path(value: object) -> str:
    """Parse a path, or an empty text."""
    return line(value, "a path")


def hub_path(value: object) -> str:
    """Parse a path or `hf:owner/repo/file`, or an empty text."""
    if (text := path(value)).startswith(HUB_PREFIX):
        hub_file(text)
    return text


def absolute(text: str, folder: Path, form: Format) -> str:
    """Return a path as absolute, relative to `folder`.  Files of the hub, bare commands and the empty text stay."""
    is_hub_file = form in (HUB_PATH, MODEL_PATH) and text.startswith(HUB_PREFIX)
    if not text or is_hub_file or (form == COMMAND and "/" not in text):
        return text
    if text.startswith("~/"):
        try:
            return str(Path.home() / text[2:])
        except RuntimeError:
            raise InvalidValue("starts with ~/, but this user has no home directory", "write the full path") from None
    return str(folder / text)


def hub_file(text: str) -> HubFile:
    """Parse `hf:owner/repo/file`, where file may contain directories; raises InvalidValue."""
    owner, _, repo_and_file = text.removeprefix(HUB_PREFIX).partition("/")
    repo, _, file = repo_and_file.partition("/")
    names_good = all(_HUB_NAME.fullmatch(name) for name in (owner, repo))
    if not names_good or any(part in ("", ".", "..") for part in file.split("/")):
        raise InvalidValue("is not a file of the hub", "write hf:owner/repo/file.gguf")
    return HubFile(owner, repo, file)


def host(value: object) -> str:
    """Parse an IP address or a host name."""
    text = _filled(value)
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        # A numeric last label is a shorthand for an address: 0 is 0.0.0.0, 127.1 is 127.0.0.1.
        is_address = bool(_NUMERIC_LABEL.fullmatch(labels[-1]))
        if is_address or len(text) > 253 or not all(_HOST_LABEL.fullmatch(label) for label in labels):
            bare = text.strip("[]")
            is_bracketed = bare != text and ":" in bare
            hint = f"nearest: {bare}" if is_bracketed else "such as 127.0.0.1, ::1, 0.0.0.0 or localhost"
            raise InvalidValue("is neither an IP address nor a host name", hint) from None
    return text


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def origin(value: object) -> str:
    """Parse an origin as browsers send it, or `*`."""
    text = _filled(value)
    if text != "*" and not _ORIGIN.fullmatch(text):
        prefix = _ORIGIN.match(text.lower())
        hint = f"nearest: {prefix[0]}" if prefix else "such as http://localhost:3000"
        raise InvalidValue("is not an origin: scheme://host or scheme://host:port in lower case, or *", hint)
    return text


def visible_device(value: object) -> str:
    """Parse a device as `CUDA_VISIBLE_DEVICES` names it, by number or UUID."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        wrong_type(value, "a number or UUID")
    text = value if isinstance(value, str) else show(value)
    if not _VISIBLE.fullmatch(text):
        raise InvalidValue("is not a device number or UUID", 'such as 0 or "GPU-4f1b..."')
    return str(text)


def environment(value: object) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise InvalidValue(f"is {kind_of(value)}, not a table", "set one variable: groups.NAME.env.VARIABLE=VALUE")
    for name, text in value.items():
        why, hint = "", "write it in quotes"
        if not _VARIABLE.fullmatch(name):
            why, hint = "is not a variable name", "use letters, digits and _, and no digit first"
        elif name in _SET_BY_SUPERVISOR:
            why = "is set by the supervisor"
            hint = "remove it; install what the daemon needs into the group's own environment"
        elif not isinstance(text, str):
            why = f"is {kind_of(text)}, not text"
        elif "\0" in text:
            why, hint = "holds a zero byte", "remove it"
        if why:
            raise InvalidValue(why, hint, value=text, inside=f".{name}")
    return MappingProxyType({name: str(text) for name, text in value.items()})


# ---- numbers, devices and splits


def size(value: object) -> int:
    """Parse bytes: an integer, or text of an integer directly followed by KiB, MiB or GiB."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        wrong_type(value, "a size")
    if isinstance(value, int):
        n_bytes = value
    elif match := _SIZE.fullmatch(value):
        n_bytes = int(match[1]) * SIZE_UNITS.get(match[2] or "", 1)
    else:
        near = _SIZE_MISSPELT.fullmatch("".join(value[:40].lower().split()))
        hint = f"nearest: {near[1]}{near[2].upper()}iB" if near else 'such as "512MiB", "20GiB" or 1048576'
        raise InvalidValue("is not a size", hint)
    if not 0 <= n_bytes <= MAX_INTEGER:
        raise InvalidValue(f"is not in 0..{MAX_INTEGER} bytes", f"nearest: {min(max(n_bytes, 0), MAX_INTEGER)}")
    return n_bytes


def device(value: object) -> DeviceRef:
    """Parse `NAME:INDEX`; the name is resolved to a group later."""
    if not isinstance(value, str):
        wrong_type(value, "GROUP:INDEX")
    if match := _DEVICE.fullmatch(value):
        return DeviceRef(match[1], int(match[2]))
    name, colon, index = "".join(value[:64].lower().split()).partition(":")  # cuda:01, CUDA: 1 or cuda
    digits = index.removeprefix("+").lstrip("0") or "0"
    near = f"{name}:{digits if colon else 0}"
    hint = f"nearest: {near}" if _DEVICE.fullmatch(near) else "such as cuda:0; an index is decimal digits, 0 to 999"
    raise InvalidValue("is not GROUP:INDEX", hint)


def split(value: object) -> Split:
    """Parse `auto`, one weight for each device, or one half-open layer range `START-STOP` for each."""
    if value == AUTO:
        return Auto()
    if isinstance(value, str):
        hint = suggest(value, [AUTO]) if len(value) < 8 else 'such as [0.5, 0.5] or ["0-4", "4-8"]'
        raise InvalidValue("is not auto, weights or layer ranges", hint)
    if not isinstance(value, list):
        wrong_type(value, "auto, weights or layer ranges")
    if not value:
        raise InvalidValue("is empty", 'write one weight or range for each target device, or "auto"')
    if all(isinstance(item, str) for item in value) or (isinstance(value[0], str) and _RANGE.fullmatch(value[0])):
        return _ranges(value)
    return _weights(value)


def _weights(values: list[Any]) -> WeightedSplit:
    weights = []
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            why, hint = f"is {kind_of(value)}, not a number", "write all weights as numbers, or all ranges as text"
            raise InvalidValue(why, hint, value=value, inside=f"[{index}]")
        if not 0 < value < 1e308:  # false for nan too
            why = "is not a finite number above 0"
            raise InvalidValue(why, "write weights such as 0.5", value=value, inside=f"[{index}]")
        weights.append(float(value))
    if math.isinf(sum(weights)):
        raise InvalidValue("has a sum that is not finite", "write smaller weights")
    return WeightedSplit(tuple(weights))


def _ranges(parts: list[Any]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    previous_stop = 0
    for index, part in enumerate(parts):
        match = _RANGE.fullmatch(part) if isinstance(part, str) else None
        start, stop = (int(match[1]), int(match[2])) if match else (0, 0)
        if match is None:
            why = "is not a layer range"
            hint = 'write all ranges as "START-STOP", such as "0-4", or all weights as numbers'
        elif start != previous_stop:
            why = f"does not start at layer {previous_stop}, where the previous range ends"
            hint = f"nearest: {previous_stop}-{max(stop, previous_stop + 1)}"
        elif stop <= start:
            why = "is empty: START-STOP is the layers from START up to, but not including, STOP"
            hint = f"nearest: {start}-{start + 1}"
        else:
            ranges.append((start, stop))
            previous_stop = stop
            continue
        raise InvalidValue(why, hint, value=part, inside=f"[{index}]")
    return Ranges(tuple(ranges))


def write_split(value: Split) -> str | list[float] | list[str]:
    match value:
        case Auto():
            return AUTO
        case WeightedSplit(values=weights):
            return list(weights)
        case Ranges(values=ranges):
            return [f"{start}-{stop}" for start, stop in ranges]


def restart_limit(value: object) -> RestartLimit:
    """Parse `COUNT/SECONDSs`."""
    match = _RESTARTS.fullmatch(value) if isinstance(value, str) else wrong_type(value, "COUNT/SECONDSs")
    if match is None:
        raise InvalidValue("is not COUNT/SECONDSs", "such as 5/60s: at most 5 restarts in any 60 seconds")
    return RestartLimit(int(match[1]), int(match[2]))


def curve_point(value: object) -> tuple[int, float]:
    """Parse `TOKENS:SHARE`."""
    match = _POINT.fullmatch(value) if isinstance(value, str) else wrong_type(value, "TOKENS:SHARE")
    if match is None:
        raise InvalidValue("is not TOKENS:SHARE", 'such as "32000:0.1"')
    share = float(match[2])
    if not 0 < share <= 1:
        raise InvalidValue("is out of range", "write a share that is a number > 0 and <= 1")
    return int(match[1]), share


_DESTINATION = re.compile(r"(?!-)[A-Za-z0-9@%+=:,./_\[\]-]+", re.ASCII)


def destination(value: object) -> str:
    """Parse what ssh takes as its destination, or an empty text."""
    text = line(value, "a host")
    if text and not _DESTINATION.fullmatch(text):
        raise InvalidValue("is not a host", "such as attic, me@attic or 10.0.0.2")
    return text


LINE = Format("text", line)
WORD = Format("text", _filled)
DESTINATION = Format("host, such as `attic` or `me@10.0.0.2`", destination)
OPTIONAL_HOST = Format("IP address or host name, or empty", lambda value: "" if value == "" else host(value))
PATH = Format("path", path)
HUB_PATH = Format("path or `hf:owner/repo/file`", hub_path)
MODEL_PATH = Format("path or `hf:owner/repo/file`", lambda value: hub_path(_filled(value)))
COMMAND = Format("command name or path", path)
GROUP = Format("group", line)
PATHS = (PATH, HUB_PATH, MODEL_PATH, COMMAND)
HOST = Format("IP address or host name", host)
ORIGIN = Format("origin such as `http://localhost:3000`, or `*`", origin)
VISIBLE_DEVICE = Format("number or UUID", visible_device)
ENVIRONMENT = Format("table of text", environment, dict)
SIZE = Format("bytes, or text such as `512MiB` (KiB, MiB, GiB)", size)
AUTO_SIZE = Format("bytes, text such as `512MiB`, or `auto`", lambda value: AUTO if value == AUTO else size(value))
DEVICE = Format("`GROUP:INDEX`, or `BACKEND:INDEX` where one group has that backend", device, str)
OPTIONAL_DEVICE = Format(
    "`GROUP:INDEX`, or empty",
    lambda value: None if value == "" else device(value),
    lambda value: "" if value is None else str(value),
)
SPLIT = Format(
    '`"auto"`, one weight > 0 per device, or one half-open range `"START-STOP"` per device', split, write_split
)
RESTART_LIMIT = Format("`COUNT/SECONDSs`, such as `5/60s`; count 0..9999, seconds 1..999999", restart_limit, str)
CURVE_POINT = Format(
    "`TOKENS:SHARE`, tokens >= 1, share number > 0 and <= 1",
    curve_point,
    lambda point: f"{point[0]}:{point[1]!r}",
)
