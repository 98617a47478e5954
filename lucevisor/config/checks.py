"""Checks across keys: devices against groups, the split against the devices, the endpoint against its API keys."""

from __future__ import annotations

import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from lucevisor.config.credentials import read_api_keys, read_credentials, server_context
from lucevisor.config.formats import (
    BACKENDS,
    CURVE_POINT,
    Auto,
    DeviceRef,
    InvalidValue,
    Ranges,
    Split,
    WeightedSplit,
    is_loopback,
    write_split,
)
from lucevisor.config.schema import keys_of
from lucevisor.config.sections import (
    GROUPS,
    MODELS,
    REPLICAS,
    SECTIONS,
    VISIBLE_DEVICES,
    ClusterConfig,
    Config,
    GroupConfig,
    Notice,
)
from lucevisor.errors import NO_VALUE, ConfigError, suggest

OVERRIDE = "--set"


@dataclass(slots=True)
class PendingConfig:
    """A configuration being loaded: values by dotted key (invalid ones are missing), the keys that the user set,
    errors."""

    file: str
    one_of_several: bool = False  # models: groups may be for others
    values: dict[str, Any] = field(default_factory=dict)
    group_names: list[str] = field(default_factory=list)
    replica_names: list[str] = field(default_factory=list)
    adapter_names: list[str] = field(default_factory=list)
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


def check_values(pending: PendingConfig) -> None:
    """Check the values against each other, and replace devices by resolved ones.  Adds errors, never raises."""
    _check_groups(pending)
    _check_split(pending)
    _resolve_device_of(pending, "draft.device")
    if (kind := pending.values.get("draft.kind")) in ("dflash", "model") and pending.values.get("draft.path") == "":
        hint = "name the drafter's file; nearest: draft.kind = auto"
        pending.refuse("draft.path", "", f"is empty, and draft.kind = {kind} needs a drafter", hint)
    _check_pflash(pending)
    _check_vision(pending)
    _check_deterministic(pending)
    _resolve_target_devices(pending)
    _check_replicas(pending)
    _check_server(pending)
    _check_cluster(pending)


def _check_groups(pending: PendingConfig) -> None:
    for name in pending.group_names:
        backend = pending.group(name, "backend")
        if backend is not None and name in BACKENDS and name != backend:
            why = f"is not the backend in the group's name: {name}:0 would look like a {name} device"
            pending.refuse(f"{GROUPS}.{name}.backend", backend, why, f"nearest: {name}, or give the group another name")
        visible = pending.group(name, "visible_devices")
        variable = VISIBLE_DEVICES.get(backend)
        if visible and variable in (pending.group(name, "env") or {}):
            why = f"sets the same as {GROUPS}.{name}.env.{variable}"
            pending.refuse(f"{GROUPS}.{name}.visible_devices", list(visible), why, "keep one of the two")


def _check_split(pending: PendingConfig) -> None:
    devices: tuple[DeviceRef, ...] | None = pending.values.get("placement.target_devices")
    split: Split | None = pending.values.get("placement.target_layer_split")
    if devices is None or not isinstance(split, WeightedSplit | Ranges) or len(split.values) == len(devices):
        return
    if pending.replica_names and devices:
        return  # checked when the devices of each are known
    noun = "weights" if isinstance(split, WeightedSplit) else "ranges"
    why = f"has {len(split.values)} {noun} for {len(devices)} devices"
    hint = f'write one for each of {", ".join(map(str, devices))}, or "auto"'
    if not devices:
        why = f"has {noun} for devices that are not named"
        hint = 'list them in placement.target_devices, or write "auto"'
    pending.refuse("placement.target_layer_split", write_split(split), why, hint)


def _check_replicas(pending: PendingConfig) -> None:
    """Check that each group is in one replica, and that no key names the device of one of them."""
    owners: dict[str, str] = {}
    for name in pending.replica_names:
        key = f"{REPLICAS}.{name}.groups"
        groups: tuple[str, ...] | None = pending.values.get(key)
        if groups == ():
            pending.refuse(key, [], "is empty", "name the groups of the replica")
        for index, group in enumerate(groups or ()):
            if group not in pending.group_names:
                hint = suggest(group, pending.group_names, "groups")
                pending.refuse(key, group, "is not a group", hint, inside=f"[{index}]")
            elif (other := owners.setdefault(group, name)) != name:
                why, hint = f"is in {REPLICAS}.{other}, too", "give each replica groups of its own"
                pending.refuse(key, group, why, hint, inside=f"[{index}]")
    if not pending.replica_names or pending.errors:
        return
    _check_split_of_replicas(pending, owners)
    for group in pending.group_names:
        if group not in owners:
            why = "is in no replica: its daemon would have nothing to do"
            pending.refuse(f"{GROUPS}.{group}", NO_VALUE, why, f"add it to groups of a [{REPLICAS}.NAME], or remove it")
    for key in ("draft.device", "pflash.device", "vision.device"):
        if (device := pending.values.get(key)) is not None:
            why = "is a device of one replica"
            pending.refuse(key, str(device), why, "leave it empty: in each replica it is that of the last layers")


def _check_split_of_replicas(pending: PendingConfig, owners: Mapping[str, str]) -> None:
    """Check that a split is of each replica, or weights of all devices."""
    devices: tuple[DeviceRef, ...] = pending.values["placement.target_devices"]
    split: Split = pending.values["placement.target_layer_split"]
    counts = Counter(owners.get(device.group) for device in devices)
    if isinstance(split, Auto) or (isinstance(split, WeightedSplit) and len(split.values) == len(devices)):
        return
    if any(counts[name] != len(split.values) for name in pending.replica_names):
        noun = "weights" if isinstance(split, WeightedSplit) else "ranges"
        have = ", ".join(f"{name} {counts[name]}" for name in pending.replica_names)
        why = f"has {len(split.values)} {noun}, and replicas have {have} devices"
        hint = 'list the devices of every replica in placement.target_devices, as many for each, or write "auto"'
        pending.refuse("placement.target_layer_split", write_split(split), why, hint)


def _resolve_target_devices(pending: PendingConfig) -> None:
    key = "placement.target_devices"
    written: tuple[DeviceRef, ...] | None = pending.values.get(key)
    if not written:  # invalid, or all devices, which the daemons report
        return
    n_errors = len(pending.errors)
    resolved: list[DeviceRef] = []
    for index, device in enumerate(written):
        target = _resolve(pending, key, device, f"[{index}]")
        if target is not None and target in resolved:
            others = {(target.group, other) for other in range(len(written) + 1)}
            free = min(others - {(device.group, device.index) for device in resolved})
            hint = f"nearest: {free[0]}:{free[1]}, if there is one"
            pending.refuse(key, str(device), "is the same device as an earlier one", hint, inside=f"[{index}]")
        elif target is not None:
            resolved.append(target)
    if len(pending.errors) == n_errors:
        pending.values[key] = tuple(resolved)
        _check_every_group_has_a_device(pending, {device.group for device in resolved})


def _resolve_device_of(pending: PendingConfig, key: str) -> None:
    device: DeviceRef | None = pending.values.get(key)
    if device is not None:
        pending.values[key] = _resolve(pending, key, device, "")


def _resolve(pending: PendingConfig, key: str, device: DeviceRef, inside: str) -> DeviceRef | None:
    """Return the device with a backend replaced by its only group, or None after adding the error."""
    backends = {name: pending.group(name, "backend") for name in pending.group_names}
    if device.group not in backends and None in backends.values():
        return None  # a group's backend is invalid; it may be the one meant here
    try:
        resolved = _in_group(device, backends)
        visible = pending.group(resolved.group, "visible_devices")
        if visible and backends[resolved.group] != "cpu" and resolved.index >= len(visible):
            why = f"is out of range: {GROUPS}.{resolved.group}.visible_devices lists {len(visible)}"
            raise InvalidValue(why, f"nearest: {resolved.group}:{len(visible) - 1}")
    except InvalidValue as error:
        pending.refuse(key, str(device), error.why, error.hint, inside=inside)
        return None
    return resolved


def _in_group(device: DeviceRef, groups: Mapping[str, str | None]) -> DeviceRef:
    """Return the device of a group; `groups`: backend by group.  Raises InvalidValue."""
    if device.group in groups:
        return device
    alike = [name for name, backend in groups.items() if backend == device.group]
    if len(alike) == 1:
        return DeviceRef(alike[0], device.index)
    candidates = [f"{name}:{device.index}" for name in alike or groups]
    if alike:
        why = f"is ambiguous: {len(alike)} groups have the backend {device.group}"
        raise InvalidValue(why, f"write one of {', '.join(candidates)}")
    verb = "has the backend" if device.group in BACKENDS else "is named"
    raise InvalidValue(f"no group {verb} {device.group}", suggest(str(device), candidates, "devices of the groups"))


def _check_every_group_has_a_device(pending: PendingConfig, used: set[str]) -> None:
    if pending.one_of_several:
        return
    used |= _groups_beside(pending.values.get)
    for name in pending.group_names:
        if name not in used:
            why = "has no device in placement.target_devices: its daemon would have nothing to do"
            hint = f"add {name}:0 to placement.target_devices, or remove [{GROUPS}.{name}]"
            pending.refuse(f"{GROUPS}.{name}", NO_VALUE, why, hint)


def _groups_beside(value: Callable[[str], Any]) -> set[str]:
    """Return the groups of the devices for drafter, scoring model and encoder that are used; ``value``: of a key."""
    used = {
        "draft.device": value("draft.kind") not in ("off", "lookup"),
        "pflash.device": value("pflash.mode") != "off" or _ranks_by_scorer(value),
        "vision.device": value("vision.path"),
    }
    devices: list[DeviceRef | None] = [value(key) for key, is_used in used.items() if is_used]
    return {device.group for device in devices if device is not None}


def _ranks_by_scorer(value: Callable[[str], Any]) -> bool:
    return bool(value("kvflash.policy") == "drafter" and value("kvflash.pool_tokens") != 0)


def _check_vision(pending: PendingConfig) -> None:
    _resolve_device_of(pending, "vision.device")
    least, most = pending.values.get("vision.min_tokens"), pending.values.get("vision.max_tokens")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        why = f"is more than vision.max_tokens = {most}"
        pending.refuse("vision.min_tokens", least, why, f"nearest: {most}")


def _check_pflash(pending: PendingConfig) -> None:
    _resolve_device_of(pending, "pflash.device")
    mode = pending.values.get("pflash.mode")
    needs = {}
    if mode not in (None, "off"):
        needs[f"pflash.mode = {mode}"] = "pflash.mode = off"
    if _ranks_by_scorer(pending.values.get):
        needs["kvflash.policy = drafter"] = "kvflash.policy = qk"
    if pending.values.get("pflash.path") == "":
        for setting, other in needs.items():
            hint = f"name a small model's file, such as Qwen3-0.6B; nearest: {other}"
            pending.refuse("pflash.path", "", f"is empty, and {setting} needs a scoring model", hint)
    points = pending.values.get("pflash.curve") or ()
    for low, high in pairwise(points):
        if high[0] <= low[0]:
            written = [CURVE_POINT.write(point) for point in points]
            why = f"has {high[0]} tokens after {low[0]}"
            pending.refuse("pflash.curve", written, why, "order the points by tokens, each once")
            return


def _check_deterministic(pending: PendingConfig) -> None:
    if not pending.values.get("engine.deterministic"):
        return
    if pending.values.get("kvflash.pool_tokens") not in (None, 0):
        why, other = "does not hold with KV Flash, which chooses pages by what ran before", "kvflash.pool_tokens = 0"
    elif pending.values.get("pflash.mode") not in (None, "off"):
        why, other = "does not hold with PFlash, whose scoring model has no such mode", "pflash.mode = off"
    else:
        return
    pending.refuse("engine.deterministic", True, why, f"choose one of the two; nearest: {other}")


def _check_server(pending: PendingConfig) -> None:
    host, file, is_open = (pending.values.get(f"server.{key}") for key in ("host", "api_keys_file", "allow_open"))
    for key in ("server.api_keys_file", "server.admin_keys_file"):
        if keys_file := pending.values.get(key):
            _check_file(pending, key, keys_file, lambda file, key=key: read_api_keys(file, key))
    if (files := _tls_files(pending, "server", "for HTTP")) and files[0]:
        cert_file, key_file = files
        _check_file(pending, "server.tls_key_file", key_file, lambda file: server_context(Path(cert_file), file))
    if host is not None and file == "" and is_open is False and not is_loopback(host):
        why = "can be reached from other machines, and no API key would be required"
        hint = "set server.api_keys_file, or server.allow_open = true to serve everyone; nearest: 127.0.0.1"
        pending.refuse("server.host", host, why, hint)


def _check_cluster(pending: PendingConfig) -> None:
    listen, secret = pending.values.get("cluster.listen"), pending.values.get("cluster.secret_file")
    hosts = {name: host for name in pending.group_names if (host := pending.group(name, "host"))}
    if listen == "":
        for name, host in hosts.items():
            hint = "write [cluster] with listen = an address of this host that the other one reaches, and secret_file"
            pending.refuse(f"{GROUPS}.{name}.host", host, "is another host, and cluster.listen is empty", hint)
        return
    if listen in ("0.0.0.0", "::"):
        hint = "name one address of this host that the others reach, such as 10.0.0.1"
        pending.refuse("cluster.listen", listen, "is no address that others can connect to", hint)
    if secret == "":
        hint = "`lucevisor cluster secret FILE` writes a file, of which every host needs a copy"
        pending.refuse("cluster.secret_file", "", "is empty, and daemons authenticate with it", hint)
    elif secret:
        _check_credentials(pending, secret)
    if pending.values.get("cluster.ssh") == ():
        pending.refuse("cluster.ssh", [], "is empty", 'nearest: ["ssh", "-T", "-o", "BatchMode=yes"]')
    if pending.values.get("cluster.launcher") == "ray":
        _check_ray(pending, hosts)


def _check_ray(pending: PendingConfig, hosts: Mapping[str, str]) -> None:
    from lucevisor.cluster.ray_nodes import Place, RayError  # one box does not need it

    if find_spec("ray") is None:
        hint = f"{sys.executable} -m pip install 'lucevisor[ray]'"
        pending.refuse("cluster.launcher", "ray", "needs the package ray, which is not installed here", hint)
    for name, host in hosts.items():
        try:
            Place.parse(host)
        except RayError as error:
            pending.refuse(f"{GROUPS}.{name}.host", host, error.why, error.hint)


def _tls_files(pending: PendingConfig, section: str, without: str) -> tuple[str, str] | None:
    """Return the files of a certificate and its key, or empty texts; None if one is missing or invalid."""
    cert, key = (pending.values.get(f"{section}.{name}") for name in ("tls_cert_file", "tls_key_file"))
    if cert is not None and key is not None and bool(cert) != bool(key):
        empty, other = ("tls_key_file", "tls_cert_file") if cert else ("tls_cert_file", "tls_key_file")
        why = f"is empty, and {section}.{other} is set"
        pending.refuse(f"{section}.{empty}", "", why, f"set both, or none {without}")
        return None
    return None if cert is None or key is None else (cert, key)


def _check_credentials(pending: PendingConfig, secret: str) -> None:
    if (files := _tls_files(pending, "cluster", "without encryption")) is None:
        return
    cert, key = files
    try:
        read_credentials(ClusterConfig(secret_file=secret, tls_cert_file=cert, tls_key_file=key))
    except ConfigError as error:
        pending.refuse(error.key, error.value, error.why, error.hint)


def _check_file(pending: PendingConfig, key: str, file: str, read: Any) -> None:
    """Read a file of secrets; warn if others can read it, too."""
    try:
        read(Path(file))
        if Path(file).stat().st_mode & stat.S_IROTH:
            why = "can be read by every user of this machine"
            pending.notices.append(Notice(key=key, value=file, why=why, hint=f"chmod 600 {file}"))
    except ConfigError as error:
        pending.refuse(error.key, error.value, error.why, error.hint)
    except OSError as error:
        pending.refuse(key, file, f"cannot be read: {error.strerror}", "name a readable file")


# ---- keys without effect


def used_groups(config: Config) -> dict[str, GroupConfig]:
    """Return the groups that the model of ``config`` uses: those of its devices, or all."""
    if not config.placement.devices:
        return dict(config.groups)
    named = {device.group for device in config.placement.devices} | _groups_beside(lambda key: attrgetter(key)(config))
    return {name: group for name, group in config.groups.items() if name in named}


def unused_settings(config: Config) -> list[Notice]:
    """Return a notice for each key that was set and has no effect beside other settings, in the order of the file."""
    notices: dict[str, Notice] = {}
    for key, because in _unused(config):
        section, _, name = key.rpartition(".")
        is_group = section.startswith(f"{GROUPS}.")
        values = config.groups[section.partition(".")[2]] if is_group else getattr(config, section)
        field_key = keys_of(GroupConfig if is_group else SECTIONS[section])[name]
        value = getattr(values, field_key.field)
        if key in config.set_keys and value != field_key.default and key not in notices:
            why, hint = f"has no effect: {because}", "remove the key, or change that setting"
            notices[key] = Notice(key=config.key(key), value=field_key.write(value), why=why, hint=hint)
    sections = ["model", MODELS, GROUPS, *SECTIONS]
    return sorted(notices.values(), key=lambda notice: sections.index(notice.key.partition(".")[0]))


def _unused(config: Config) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and the reason that each has no effect."""
    placement, cache, draft, kvflash, pflash = (
        config.placement, config.cache, config.draft, config.kvflash, config.pflash,
    )  # fmt: skip
    one_device = bool(placement.devices) and all(len(own.placement.devices) == 1 for own in config.each_replica)
    server = config.server
    if not config.section:
        yield "model.memory_share", "there is one model"
    for group in config.groups.values():
        key = f"{GROUPS}.{group.name}." + ("visible_devices" if group.backend == "cpu" else "threads")
        yield key, f"it is not for groups with backend {group.backend}"
    if one_device and isinstance(placement.split, WeightedSplit):
        yield "placement.target_layer_split", "one device holds all layers"
    if one_device or not isinstance(placement.split, Auto):
        yield "placement.goal", 'it is for placement.target_layer_split = "auto" and two or more devices'
    if is_loopback(server.host) or server.api_keys_file:
        yield "server.allow_open", "server.host is for this machine only, or server.api_keys_file is set"
    if cache.prefix_slots == 0:
        for name in ("memory", "states", "min_tokens", "checkpoint_pages", "host", "dir", "disk"):
            yield f"cache.{name}", "cache.prefix_slots is 0"
    if not cache.dir:
        yield "cache.disk", "cache.dir is empty"
    if not config.cluster.listen:
        for name in ("port", "secret_file", "tls_cert_file", "tls_key_file", "launcher", "ssh", "ray_address"):
            yield f"cluster.{name}", "cluster.listen is empty"
    else:
        other = "ssh" if config.cluster.launcher == "ray" else "ray_address"
        yield f"cluster.{other}", f"cluster.launcher is {config.cluster.launcher}"
    if all(group.shares_memory for group in config.groups.values()):
        yield "cluster.listen", f"no group has a host: set {GROUPS}.NAME.host"
        yield "cluster.cache_dir", f"no group has a host: set {GROUPS}.NAME.host"
    if draft.kind in ("off", "lookup"):
        for name in ("path", "device", "width") if draft.kind == "off" else ("path", "device"):
            yield f"draft.{name}", f"draft.kind is {draft.kind}"
    if kvflash.pool_tokens == 0:
        for name in ("policy", "host", "tau"):
            yield f"kvflash.{name}", "kvflash.pool_tokens is 0"
    if kvflash.policy != "qk":
        yield "kvflash.tau", f"kvflash.policy is {kvflash.policy}"
    if kvflash.policy == "lru":
        yield "kvflash.host", "kvflash.policy lru keeps no page in host memory"
    if config.recovery.hold_s == 0 and config.recovery.journal != 0:
        yield "recovery.journal", "recovery.hold_s is 0"
    if pflash.mode == "off":
        for name in ("threshold", "keep_ratio", "curve") + (() if config.scores else ("path", "device", "window")):
            yield f"pflash.{name}", "pflash.mode is off"
    if pflash.mode == "always":
        yield "pflash.threshold", "pflash.mode is always"
    if pflash.curve:
        yield "pflash.keep_ratio", "pflash.curve is set"
    if not config.vision.path:
        for name in ("device", "min_tokens", "max_tokens", "media_path"):
            yield f"vision.{name}", "vision.path is empty"
