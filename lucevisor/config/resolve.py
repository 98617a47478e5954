"""Checks across keys: devices against groups, the split against the devices, the endpoint against its API keys.

Knows no TOML, and of the machine only the files of keys and of TLS. Invariant: `resolve` adds to
`PendingConfig.errors` and never raises. Invalid values are missing from `PendingConfig.values`, so each is reported
once.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lucevisor.config.api_keys import read_api_keys
from lucevisor.config.draft import DRAFTER_CHOICES
from lucevisor.config.pflash import Point
from lucevisor.config.schema import GROUPS
from lucevisor.config.sections import visible_devices_variable
from lucevisor.config.strict import Refused, choose
from lucevisor.config.tls import server_context
from lucevisor.config.values import BACKENDS, DeviceRef, LayerSplit, Notice, Ranges, Split, WeightedSplit, is_loopback
from lucevisor.errors import NO_VALUE, ConfigError

OVERRIDE = "--set"


@dataclass(slots=True)
class PendingConfig:
    """A configuration being loaded: values by dotted key, the keys that the user set, errors and notices."""

    file: str
    values: dict[str, Any] = field(default_factory=dict)
    group_names: list[str] = field(default_factory=list)
    set_keys: set[str] = field(default_factory=set)
    overridden: set[str] = field(default_factory=set)
    errors: list[ConfigError] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    def refuse(self, key: str, value: object, why: str, hint: str = "", *, inside: str = "") -> None:
        """Add an error about a key (`inside`: `[1]`, for example), with the file or `--set` as its source."""
        origin = OVERRIDE if key in self.overridden or f"{key}{inside}" in self.overridden else self.file
        self.errors.append(ConfigError(f"{key}{inside}", value, why, hint, file=origin))

    def group(self, name: str, key: str) -> Any:
        """Return a group's value, or None if it was invalid."""
        return self.values.get(f"{GROUPS}.{name}.{key}")


def resolve(pending: PendingConfig) -> None:
    """Check the values against each other, and replace devices by resolved ones."""
    _check_groups(pending)
    _check_split(pending)
    _resolve_draft(pending)
    _resolve_pflash(pending)
    _resolve_devices(pending)
    _check_server(pending)


def _check_groups(pending: PendingConfig) -> None:
    for name in pending.group_names:
        backend = pending.group(name, "backend")
        if backend is not None and name in BACKENDS and name != backend:
            why = f"is not the backend in the group's name: {name}:0 would look like a {name} device"
            pending.refuse(f"{GROUPS}.{name}.backend", backend, why, f"nearest: {name}, or give the group another name")
        variable = visible_devices_variable(backend) if backend is not None else ""
        if pending.group(name, "visible_devices") and variable in (pending.group(name, "env") or {}):
            why = f"sets the same as {GROUPS}.{name}.env.{variable}"
            pending.refuse(
                f"{GROUPS}.{name}.visible_devices",
                list(pending.group(name, "visible_devices")),
                why,
                "keep one of the two",
            )


def _check_split(pending: PendingConfig) -> None:
    devices: Sequence[DeviceRef] | None = pending.values.get("placement.target_devices")
    split: Split | None = pending.values.get("placement.target_layer_split")
    if devices is None or not isinstance(split, WeightedSplit | Ranges) or len(split.values) == len(devices):
        return
    what = "weights" if isinstance(split, WeightedSplit) else "ranges"
    names = ", ".join(map(str, devices))
    why = f"has {len(split.values)} {what} for {len(devices)} devices"
    hint = f'write one for each of {names}, or "auto"'
    if not devices:
        why, hint = (
            f"has {what} for devices that are not named",
            'list them in placement.target_devices, or write "auto"',
        )
    pending.refuse("placement.target_layer_split", LayerSplit().write(split), why, hint)


def _resolve_devices(pending: PendingConfig) -> None:
    key = "placement.target_devices"
    written: Sequence[DeviceRef] | None = pending.values.get(key)
    if not written:  # invalid, or all of them, which the daemons tell
        return
    n_errors = len(pending.errors)
    resolved: list[DeviceRef] = []
    for index, device in enumerate(written):
        found = _resolve_one(pending, key, device, f"[{index}]")
        if found is not None and found in resolved:
            others = {(found.group, other) for other in range(len(written) + 1)}
            free = min(others - {(device.group, device.index) for device in resolved})
            why, hint = "is the same device as an earlier one", f"nearest: {free[0]}:{free[1]}, if there is one"
            pending.refuse(key, str(device), why, hint, inside=f"[{index}]")
        elif found is not None:
            resolved.append(found)
    if len(pending.errors) == n_errors:
        pending.values[key] = tuple(resolved)
        _check_every_group_has_a_device(pending, resolved)


def _resolve_one(pending: PendingConfig, key: str, device: DeviceRef, inside: str) -> DeviceRef | None:
    """Return the resolved device, or None after adding the error."""
    backends = {name: pending.group(name, "backend") for name in pending.group_names}
    if device.group not in backends and None in backends.values():
        return None  # a group's backend is invalid; it may be the one meant here
    try:
        found = _resolve_device(device, backends)
    except Refused as refused:
        pending.refuse(key, str(device), refused.why, refused.hint, inside=inside)
        return None
    visible = pending.group(found.group, "visible_devices")
    if visible and backends[found.group] != "cpu" and found.index >= len(visible):
        why = f"is out of range: {GROUPS}.{found.group}.visible_devices lists {len(visible)}"
        pending.refuse(key, str(device), why, f"nearest: {found.group}:{len(visible) - 1}", inside=inside)
        return None
    return found


def _resolve_device(device: DeviceRef, groups: Mapping[str, str | None]) -> DeviceRef:
    """Return the device with a backend replaced by its only group; `groups`: backend by group. Raises Refused."""
    if device.group in groups:
        return device
    alike = [name for name, backend in groups.items() if backend == device.group]
    if len(alike) == 1:
        return DeviceRef(alike[0], device.index)
    candidates = [f"{name}:{device.index}" for name in alike or groups]
    if alike:
        raise Refused(
            f"is ambiguous: {len(alike)} groups have the backend {device.group}",
            f"write one of {', '.join(candidates)}",
        )
    what = (
        f"no group has the backend {device.group}" if device.group in BACKENDS else f"no group is named {device.group}"
    )
    raise Refused(what, choose(str(device), candidates, "devices of the groups"))


def _check_every_group_has_a_device(pending: PendingConfig, devices: Sequence[DeviceRef]) -> None:
    used = {device.group for device in devices}
    drafter: DeviceRef | None = pending.values.get("draft.device")
    if drafter is not None and pending.values.get("draft.kind") in DRAFTER_CHOICES:
        used.add(drafter.group)
    scorer: DeviceRef | None = pending.values.get("pflash.device")
    if scorer is not None and (pending.values.get("pflash.mode") != "off" or _ranks_by_scorer(pending)):
        used.add(scorer.group)
    for name in pending.group_names:
        if name not in used:
            why = "has no device in placement.target_devices: its daemon would have nothing to do"
            pending.refuse(
                f"{GROUPS}.{name}",
                NO_VALUE,
                why,
                f"add {name}:0 to placement.target_devices, or remove [{GROUPS}.{name}]",
            )


def _resolve_draft(pending: PendingConfig) -> None:
    device: DeviceRef | None = pending.values.get("draft.device")
    if device is not None:
        pending.values["draft.device"] = _resolve_one(pending, "draft.device", device, "")
    if pending.values.get("draft.kind") == "dflash" and pending.values.get("draft.path") == "":
        hint = "name the drafter's file; nearest: draft.kind = auto"
        pending.refuse("draft.path", "", "is empty, and draft.kind = dflash needs a drafter", hint)


def _ranks_by_scorer(pending: PendingConfig) -> bool:
    return pending.values.get("kvflash.policy") == "drafter" and pending.values.get("kvflash.pool_tokens") != 0


def _resolve_pflash(pending: PendingConfig) -> None:
    device: DeviceRef | None = pending.values.get("pflash.device")
    if device is not None:
        pending.values["pflash.device"] = _resolve_one(pending, "pflash.device", device, "")
    mode = pending.values.get("pflash.mode")
    if mode not in (None, "off") and pending.values.get("pflash.path") == "":
        hint = "name a small model's file, such as Qwen3-0.6B; nearest: pflash.mode = off"
        pending.refuse("pflash.path", "", f"is empty, and pflash.mode = {mode} needs a scoring model", hint)
    if _ranks_by_scorer(pending) and pending.values.get("pflash.path") == "":
        hint = "name a small model's file, such as Qwen3-0.6B; nearest: kvflash.policy = qk"
        pending.refuse("pflash.path", "", "is empty, and kvflash.policy = drafter needs a scoring model", hint)
    points = pending.values.get("pflash.curve") or ()
    for low, high in pairwise(points):
        if high[0] <= low[0]:
            why = f"has {high[0]} tokens after {low[0]}"
            written = [Point().write(point) for point in points]
            pending.refuse("pflash.curve", written, why, "order the points by tokens, each once")
            return


def _check_server(pending: PendingConfig) -> None:
    host, file, is_open = (pending.values.get(f"server.{key}") for key in ("host", "api_keys_file", "allow_open"))
    for key in ("server.api_keys_file", "server.admin_keys_file"):
        if named := pending.values.get(key):
            _check_keys_file(pending, key, named)
    _check_tls(pending)
    if host is not None and file == "" and is_open is False and not is_loopback(host):
        why = "can be reached from other machines, and no API key would be required"
        hint = "set server.api_keys_file, or server.allow_open = true to serve everyone; nearest: 127.0.0.1"
        pending.refuse("server.host", host, why, hint)


def _check_keys_file(pending: PendingConfig, key: str, file: str) -> None:
    try:
        read_api_keys(Path(file), key)
        _warn_if_readable_by_all(pending, key, file)
    except ConfigError as error:
        pending.refuse(error.key, error.value, error.why, error.hint)
    except OSError as error:
        pending.refuse(key, file, f"cannot be read: {error.strerror}", "name a readable text file")


def _check_tls(pending: PendingConfig) -> None:
    cert_file, key_file = (pending.values.get(f"server.{key}") for key in ("tls_cert_file", "tls_key_file"))
    if cert_file is None or key_file is None or cert_file == key_file == "":
        return
    for key, file, other in (("tls_cert_file", cert_file, "tls_key_file"), ("tls_key_file", key_file, "tls_cert_file")):
        if not file:
            pending.refuse(f"server.{key}", "", f"is empty, and server.{other} is set", "set both, or none for HTTP")
            return
    try:
        server_context(Path(cert_file), Path(key_file))
        _warn_if_readable_by_all(pending, "server.tls_key_file", key_file)
    except ConfigError as error:
        pending.refuse(error.key, error.value, error.why, error.hint)


def _warn_if_readable_by_all(pending: PendingConfig, key: str, file: str) -> None:
    if Path(file).stat().st_mode & stat.S_IROTH:
        why, hint = "can be read by every user of this machine", f"chmod 600 {file}"
        pending.notices.append(Notice(key=key, value=file, why=why, hint=hint))
