"""Loads a TOML file with `--set` overrides into a `Config`.

Knows nothing about devices or models, and reads only two files: the configuration and the API keys. Invariant: `load`
returns a valid Config or raises ConfigError with every fault found, never another exception; unknown keys are never
skipped.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lucevisor.config.effects import not_yet_effective
from lucevisor.config.names import FilePath
from lucevisor.config.resolve import OVERRIDE, PendingConfig, resolve
from lucevisor.config.schema import GROUPS, SECTIONS, Config, FieldKey, keys_of
from lucevisor.config.sections import GroupConfig
from lucevisor.config.strict import Refused, Text, choose, kind_of, nearest, plain
from lucevisor.config.toml_limits import MAX_FILE_BYTES, fault
from lucevisor.config.values import GROUP_NAME
from lucevisor.errors import NO_VALUE, ConfigError, ConfigErrors

_MAX_OVERRIDES = 256
_ENV = "env"


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in the file at `path`, with `KEY=VALUE` overrides on top.

    Raises ConfigError, or its subclass ConfigErrors for several faults.
    """
    tree = _read_tree(path)
    try:
        file = path.absolute()
    except OSError as error:
        raise ConfigError(
            "",
            NO_VALUE,
            f"the working directory no longer exists: {error.strerror}",
            "change to another",
            file=str(path),
        ) from None
    return from_tree(tree, file, overrides, shown_as=str(path))


def values_in_file(path: Path, keys: Iterable[str]) -> dict[str, object]:
    """Return what the file at `path` says for each of `keys`; None where it does not set it.  Raises ConfigError."""
    tree = _read_tree(path)
    return {key: _lookup(tree, key.split(".")) for key in keys}


def _lookup(tree: object, parts: Sequence[str]) -> object:
    if not parts:
        return tree
    return _lookup(tree.get(parts[0]), parts[1:]) if isinstance(tree, Mapping) else None


def from_tree(tree: Mapping[str, object], file: Path, overrides: Sequence[str] = (), *, shown_as: str = "") -> Config:
    """Return the configuration in a tree read by tomllib from `file` (absolute; relative paths start at its directory).

    Raises ConfigError.
    """
    pending = PendingConfig(file=shown_as or str(file))
    sections = _overridden(tree, overrides, pending)
    for name in sections:
        if name not in SECTIONS and name != GROUPS:
            pending.refuse(name, sections[name], "is not a section", _nearest_section(name))
    for name, section in SECTIONS.items():
        _read_section(pending, name, section, sections.get(name, {}), file.parent)
        if name == "model":
            _read_groups(pending, sections.get(GROUPS, {}), file.parent)
    resolve(pending)
    if pending.errors:
        raise pending.errors[0] if len(pending.errors) == 1 else ConfigErrors(pending.errors)
    return dataclasses.replace(_build(pending, file), overrides=tuple(overrides))


def _read_tree(path: Path) -> Mapping[str, object]:
    """Return the tables of a TOML file, or raise ConfigError."""

    def wrong(why: str, hint: str) -> ConfigError:
        return ConfigError("", NO_VALUE, why, hint, file=str(path))

    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        near = difflib.get_close_matches(path.name, (file.name for file in path.parent.glob("*.toml")), n=1)
        hint = f"nearest: {path.with_name(near[0])}" if near else "name a configuration file"
        raise wrong(f"cannot be read: {why}", f"{hint}; etc/lucevisor.toml shows every key") from None
    if len(content) > MAX_FILE_BYTES:
        raise wrong(f"is larger than {MAX_FILE_BYTES >> 10} KiB", "name a configuration file in TOML, not a model")
    try:
        text = content.decode("utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise wrong(f"is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    if too_much := fault(text):
        raise wrong(too_much, "name a configuration file; etc/lucevisor.toml shows every key")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, too many digits, nested too deep
        raise wrong(f"is not TOML: {error}", "quote text, and write lists in square brackets") from None


def _overridden(tree: Mapping[str, object], overrides: Sequence[str], pending: PendingConfig) -> dict[str, object]:
    """Return a copy of the tables with the overrides applied as Text, and record their keys in `pending`."""
    sections: dict[str, object] = dict(tree)
    if len(overrides) > _MAX_OVERRIDES:
        why = f"is given {len(overrides)} times, more than {_MAX_OVERRIDES}"
        raise ConfigError(OVERRIDE, NO_VALUE, why, "write the keys into the configuration file")
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.split(".")
        if not equals:
            pending.errors.append(ConfigError(OVERRIDE, override, "is not KEY=VALUE", "such as --set server.port=8081"))
        elif parts[0] not in SECTIONS and parts[0] != GROUPS and len(parts) > 1:
            hint = _nearest_section(parts[0])
            pending.errors.append(
                ConfigError(key, text, f"is not a key: there is no section {parts[0]}", hint, file=OVERRIDE)
            )
        elif not _is_key(parts):
            pending.errors.append(ConfigError(key, text, "is not a key", _nearest_key(key), file=OVERRIDE))
        elif key in pending.overridden:
            pending.errors.append(
                ConfigError(key, text, "is set twice", f"give one {OVERRIDE} for each key", file=OVERRIDE)
            )
        else:
            pending.overridden.add(key)
            _put(sections, parts, Text(text))
    return sections


def _is_key(parts: Sequence[str]) -> bool:
    """Return whether dotted parts could be a key; whether the key exists is checked with all others."""
    if parts[0] == GROUPS:
        return len(parts) == 3 or (len(parts) == 4 and parts[2] == _ENV)
    return len(parts) == 2


def _put(table: dict[str, object], parts: Sequence[str], value: Text) -> None:
    """Set a value in nested tables, copying each table on the way; values that are not tables are reported later."""
    for part in parts[:-1]:
        inner = table.get(part, {})
        if not isinstance(inner, dict):
            return
        table[part] = dict(inner)
        table = table[part]  # type: ignore[assignment]
    table[parts[-1]] = value


def _read_groups(pending: PendingConfig, groups: object, folder: Path) -> None:
    if not isinstance(groups, dict):
        pending.refuse(
            GROUPS, groups, f"is {kind_of(groups)}, not a table", f"write [{GROUPS}.NAME] and backend = below it"
        )
        return
    if not groups:
        pending.refuse(
            GROUPS, NO_VALUE, "is missing", f"add [{GROUPS}.NAME] with backend = cpu, cuda or hip for each interpreter"
        )
    for name, group in groups.items():
        if not GROUP_NAME.fullmatch(name):
            near = "".join(letter for letter in name.lower()[:32] if GROUP_NAME.fullmatch(letter))
            hint = f"nearest: {near}" if near else "such as left"
            pending.refuse(f"{GROUPS}.{name}", NO_VALUE, "is not a group name: use 1 to 32 of a-z 0-9 _ -", hint)
            continue
        pending.group_names.append(name)
        _read_section(pending, f"{GROUPS}.{name}", GroupConfig, group, folder)


def _read_section(pending: PendingConfig, name: str, section: type[Any], table: object, folder: Path) -> None:
    """Read the keys of one section into `pending.values`, defaults included."""
    if not isinstance(table, dict):
        pending.refuse(name, table, f"is {kind_of(table)}, not a table", f"write [{name}] and its keys below it")
        return
    keys = keys_of(section)
    for key in table:
        if key not in keys:
            hint = _nearest_in_section(key, list(keys))
            pending.refuse(f"{name}.{key}", table[key], f"is not a key of [{name}]", hint)
    for key, each in keys.items():
        dotted = f"{name}.{key}"
        if key in table:
            pending.set_keys.add(dotted)
            _read_key(pending, dotted, each, table[key], folder)
        elif each.required:
            pending.refuse(
                dotted, NO_VALUE, "is missing", f"add {key} = under [{name}]: {plain(each.key.kind.allowed())}"
            )
        else:
            pending.values[dotted] = each.default


def _read_key(pending: PendingConfig, key: str, each: FieldKey, raw: object, folder: Path) -> None:
    kind = each.key.kind
    try:
        value = kind.read(raw)
        if isinstance(kind, FilePath):
            value = kind.resolve(value, folder)
    except Refused as refused:
        pending.refuse(key, refused.value if refused.inside else raw, refused.why, refused.hint, inside=refused.inside)
        return
    pending.values[key] = value


def _build(pending: PendingConfig, file: Path) -> Config:
    """Return the Config of valid values."""

    def made(name: str, section: type[Any], /, **more: object) -> Any:
        return section(
            **more, **{each.field: pending.values[f"{name}.{key}"] for key, each in keys_of(section).items()}
        )

    groups = {name: made(f"{GROUPS}.{name}", GroupConfig, name=name) for name in pending.group_names}
    config = Config(
        file=file,
        groups=MappingProxyType(groups),
        set_keys=frozenset(pending.set_keys),
        **{name: made(name, section) for name, section in SECTIONS.items()},
    )
    return dataclasses.replace(config, notices=(*pending.notices, *not_yet_effective(config)))


def _all_keys() -> list[str]:
    sections = {**SECTIONS, f"{GROUPS}.NAME": GroupConfig}
    return [f"{name}.{key}" for name, section in sections.items() for key in keys_of(section)]


def _nearest_section(name: str) -> str:
    """Return the hint for an unknown section: a key of that name, else similar sections."""
    key = next((dotted for dotted in _all_keys() if dotted.endswith(f".{name}")), "")
    return f"nearest: {key}" if key else choose(name, [*SECTIONS, GROUPS], "sections")


def _nearest_in_section(key: str, keys: list[str]) -> str:
    """Return the hint for an unknown key: the same key in another section, else the nearest in its own."""
    elsewhere = next((dotted for dotted in _all_keys() if dotted.endswith(f".{key}")), "")
    return f"nearest: {elsewhere}" if elsewhere and not nearest(key, keys) else choose(key, keys, "keys")


def _nearest_key(key: str) -> str:
    """Return the hint for an override of an unknown key."""
    return choose(key, _all_keys()) or f"such as server.port, or {GROUPS}.NAME.threads"
