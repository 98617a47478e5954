"""Value types for names of external things: files, hosts, origins, visible devices, environment variables.

Opens and resolves nothing: whether they exist is not checked. Invariant: a parsed name can be passed on unchanged to
the operating system or a browser.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from lucevisor.config.strict import Line, Refused, ValueType, kind_of
from lucevisor.config.values import HUB_PREFIX, hub_file
from lucevisor.errors import show

_HOST_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", re.ASCII)
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,A-Z]+", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SET_BY_SUPERVISOR = frozenset({"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONIOENCODING"})
_VISIBLE = re.compile(r"0|[1-9][0-9]{0,2}|[A-Za-z][A-Za-z0-9:/_-]{3,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class FilePath(Line):
    """A path, relative to the configuration file. `hub`: also `hf:owner/repo/file`; `command`: bare names use PATH."""

    hub: bool = False
    command: bool = False
    wants: ClassVar[str] = "a path"

    def from_text(self, text: str) -> str:
        path = Line.from_text(self, text)
        if self.hub and path.startswith(HUB_PREFIX):
            hub_file(path)
        return path

    def resolve(self, path: str, folder: Path) -> str:
        """Return a path as absolute, relative to `folder` (absolute); the empty path stays empty."""
        if not path or (self.hub and path.startswith(HUB_PREFIX)) or (self.command and "/" not in path):
            return path
        if path.startswith("~/"):
            try:
                return str(Path.home() / path[2:])
            except RuntimeError:
                raise Refused("starts with ~/, but this user has no home directory", "write the full path") from None
        return str(folder / path)

    def allowed(self) -> str:
        return "path or `hf:owner/repo/file`" if self.hub else "command name or path" if self.command else "path"


@dataclass(frozen=True, slots=True)
class VisibleDevice(ValueType[str]):
    """A device as `CUDA_VISIBLE_DEVICES` names it: a number or a UUID."""

    wants: ClassVar[str] = "a number or UUID"

    def from_toml(self, value: object) -> str:
        if isinstance(value, str):
            return self.from_text(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return self.from_text(show(value))
        raise self.mistyped(value)

    def from_text(self, text: str) -> str:
        if not _VISIBLE.fullmatch(text):
            raise Refused("is not a device number or UUID", 'such as 0 or "GPU-4f1b..."', value=text)
        return text

    def allowed(self) -> str:
        return "number or UUID"


@dataclass(frozen=True, slots=True)
class Host(Line):
    """An IP address or a host name."""

    may_be_empty: bool = False

    def from_text(self, text: str) -> str:
        host = Line.from_text(self, text)
        try:
            ipaddress.ip_address(host)
        except ValueError:
            labels = host.removesuffix(".").split(".")
            # A numeric last label is a shorthand for an address: 0 is 0.0.0.0, 127.1 is 127.0.0.1.
            is_address = bool(_NUMERIC_LABEL.fullmatch(labels[-1]))
            if is_address or len(host) > 253 or not all(_HOST_LABEL.fullmatch(label) for label in labels):
                bare = host.strip("[]")
                near = (
                    f"nearest: {bare}"
                    if bare != host and ":" in bare
                    else "such as 127.0.0.1, ::1, 0.0.0.0 or localhost"
                )
                raise Refused("is neither an IP address nor a host name", near, value=text) from None
        return host

    def allowed(self) -> str:
        return "IP address or host name"


@dataclass(frozen=True, slots=True)
class Origin(Line):
    """An origin as browsers send it, or `*`."""

    may_be_empty: bool = False

    def from_text(self, text: str) -> str:
        origin = Line.from_text(self, text)
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            cut = re.match(_ORIGIN, origin.lower())
            near = f"nearest: {cut[0]}" if cut else "such as http://localhost:3000"
            raise Refused("is not an origin: scheme://host or scheme://host:port in lower case, or *", near, value=text)
        return origin

    def allowed(self) -> str:
        return "origin such as `http://localhost:3000`, or `*`"


@dataclass(frozen=True, slots=True)
class Environment(ValueType[Mapping[str, str]]):
    """A table of environment variables."""

    wants: ClassVar[str] = "a table"

    def from_toml(self, value: object) -> Mapping[str, str]:
        if not isinstance(value, dict):
            raise self.mistyped(value)
        for name, item in value.items():
            if not _VARIABLE.fullmatch(name):
                raise Refused(
                    "is not a variable name",
                    "use letters, digits and _, and no digit first",
                    value=item,
                    inside=f".{name}",
                )
            if name in _SET_BY_SUPERVISOR:
                hint = "remove it; install what the daemon needs into the group's own environment"
                raise Refused("is set by the supervisor", hint, value=item, inside=f".{name}")
            if not isinstance(item, str):
                raise Refused(f"is {kind_of(item)}, not text", "write it in quotes", value=item, inside=f".{name}")
            if "\0" in item:
                raise Refused("holds a zero byte", "remove it", value=item, inside=f".{name}")
        return MappingProxyType({name: str(item) for name, item in value.items()})

    def from_text(self, text: str) -> Mapping[str, str]:
        raise Refused("is a table", "set one variable: groups.NAME.env.VARIABLE=VALUE", value=text)

    def write(self, value: Mapping[str, str]) -> object:
        return dict(value)

    def allowed(self) -> str:
        return "table of text"
