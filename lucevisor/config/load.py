"""Loads a TOML file with `--set` overrides into a `Config`.

`load` returns a valid Config or raises ConfigError with every fault of the file, never another exception.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from lucevisor.config.checks import OVERRIDE, PendingConfig, check_values, unused_settings
from lucevisor.config.formats import GROUP_NAME, InvalidValue, kind_of
from lucevisor.config.schema import FieldKey, Text, keys_of, plain
from lucevisor.config.sections import GROUPS, SECTIONS, Config, GroupConfig
from lucevisor.errors import NO_VALUE, ConfigError, ConfigErrors, nearest, suggest

MAX_FILE_BYTES: Final = 64 * 1024
"""Time and memory of tomllib grow with the square of the parts of a dotted name."""
_MAX_OVERRIDES = 256


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in the file at `path`, with `KEY=VALUE` overrides on top.

    Raises ConfigError, or its subclass ConfigErrors for several faults.
    """
    tree = _read_tree(path)
    try:
        file = path.absolute()
    except OSError as error:
        why = f"the working directory no longer exists: {error.strerror}"
        raise ConfigError("", NO_VALUE, why, "change to another", file=str(path)) from None
    return from_tree(tree, file, overrides, shown_as=str(path))


def values_in_file(path: Path, keys: Iterable[str]) -> dict[str, object]:
    """Return the value of each of `keys` in the file at `path`, None for keys that are not set.  Raises ConfigError."""
    tree, values = _read_tree(path), {}
    for key in keys:
        value: object = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        values[key] = value
    return values


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
    check_values(pending)
    if pending.errors:
        raise pending.errors[0] if len(pending.errors) == 1 else ConfigErrors(pending.errors)
    return dataclasses.replace(_build(pending, file), overrides=tuple(overrides))


def changed_keys(before: Config, after: Config) -> list[str]:
    """Return the dotted keys whose values differ; `groups.NAME` for a group that only one of them has."""
    old, new = _flat(before), _flat(after)
    of_one = sorted(before.groups.keys() ^ after.groups.keys())
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    prefixes = tuple(f"{GROUPS}.{name}." for name in of_one)
    return [key for key in differing if not key.startswith(prefixes)] + [f"{GROUPS}.{name}" for name in of_one]


def merge_overrides(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return `KEY=VALUE` overrides in which those of `later` replace the earlier ones of the same key."""
    keys = {override.partition("=")[0] for override in later}
    return [*(override for override in earlier if override.partition("=")[0] not in keys), *later]


def _flat(config: Config) -> Mapping[str, Any]:
    sections: dict[str, Any] = config.as_dict()
    groups = {f"{GROUPS}.{name}": keys for name, keys in sections.pop(GROUPS).items()}
    return {f"{name}.{key}": value for name, keys in {**sections, **groups}.items() for key, value in keys.items()}


# ---- the file and the overrides


def _read_tree(path: Path) -> Mapping[str, object]:
    """Return the tables of a TOML file, or raise ConfigError."""

    def wrong(why: str, hint: str) -> ConfigError:
        return ConfigError("", NO_VALUE, why, hint, file=str(path))

    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        near = nearest(path.name, (file.name for file in path.parent.glob("*.toml")), 0.6)
        hint = f"nearest: {path.with_name(near)}" if near else "name a configuration file"
        raise wrong(f"cannot be read: {why}", f"{hint}; etc/lucevisor.toml shows every key") from None
    if len(content) > MAX_FILE_BYTES:
        hint = "`lucevisor init MODEL > box.toml` writes one for a model"
        raise wrong(f"is larger than {MAX_FILE_BYTES >> 10} KiB", hint)
    try:
        text = content.decode("utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise wrong(f"is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
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
            continue
        why, hint = "", ""
        if parts[0] not in SECTIONS and parts[0] != GROUPS and len(parts) > 1:
            why, hint = f"is not a key: there is no section {parts[0]}", _nearest_section(parts[0])
        elif not _is_key(parts):
            hint = suggest(key, _all_keys()) or f"such as server.port, or {GROUPS}.NAME.threads"
            why = "is not a key"
        elif key in pending.overridden:
            why, hint = "is set twice", f"give one {OVERRIDE} for each key"
        if why:
            pending.errors.append(ConfigError(key, text, why, hint, file=OVERRIDE))
        else:
            pending.overridden.add(key)
            _put(sections, parts, Text(text))
    return sections


def _is_key(parts: Sequence[str]) -> bool:
    """Return whether dotted parts could be a key; whether the key exists is checked with all others."""
    if parts[0] == GROUPS:
        return len(parts) == 3 or (len(parts) == 4 and parts[2] == "env")
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


# ---- sections and groups


def _read_groups(pending: PendingConfig, groups: object, folder: Path) -> None:
    if not isinstance(groups, dict):
        hint = f"write [{GROUPS}.NAME] and backend = below it"
        pending.refuse(GROUPS, groups, f"is {kind_of(groups)}, not a table", hint)
        return
    if not groups:
        hint = f"add [{GROUPS}.NAME] with backend = cpu, cuda or hip for each interpreter"
        pending.refuse(GROUPS, NO_VALUE, "is missing", hint)
    for name, group in groups.items():
        if GROUP_NAME.fullmatch(name):
            pending.group_names.append(name)
            _read_section(pending, f"{GROUPS}.{name}", GroupConfig, group, folder)
            continue
        near = "".join(letter for letter in name.lower()[:32] if GROUP_NAME.fullmatch(letter))
        hint = f"nearest: {near}" if near else "such as left"
        pending.refuse(f"{GROUPS}.{name}", NO_VALUE, "is not a group name: use 1 to 32 of a-z 0-9 _ -", hint)


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
    for key, field_key in keys.items():
        dotted = f"{name}.{key}"
        if key in table:
            pending.set_keys.add(dotted)
            _read_key(pending, dotted, field_key, table[key], folder)
        elif field_key.required:
            hint = f"add {key} = under [{name}]: {plain(field_key.allowed)}"
            pending.refuse(dotted, NO_VALUE, "is missing", hint)
        else:
            pending.values[dotted] = field_key.default


def _read_key(pending: PendingConfig, key: str, field_key: FieldKey, raw: object, folder: Path) -> None:
    try:
        pending.values[key] = field_key.read(raw, folder)
    except InvalidValue as error:
        pending.refuse(key, error.value, error.why, error.hint, inside=error.inside)


def _build(pending: PendingConfig, file: Path) -> Config:
    """Return the Config of valid values."""

    def make(name: str, section: type[Any], /, **more: object) -> Any:
        keys = keys_of(section)
        return section(**more, **{keys[key].field: pending.values[f"{name}.{key}"] for key in keys})

    groups = {name: make(f"{GROUPS}.{name}", GroupConfig, name=name) for name in pending.group_names}
    config = Config(
        file=file,
        groups=MappingProxyType(groups),
        set_keys=frozenset(pending.set_keys),
        **{name: make(name, section) for name, section in SECTIONS.items()},
    )
    return dataclasses.replace(config, notices=(*pending.notices, *unused_settings(config)))


def _all_keys() -> list[str]:
    sections = {**SECTIONS, f"{GROUPS}.NAME": GroupConfig}
    return [f"{name}.{key}" for name, section in sections.items() for key in keys_of(section)]


def _nearest_section(name: str) -> str:
    """Return the hint for an unknown section: a key of that name, else similar sections."""
    key = next((dotted for dotted in _all_keys() if dotted.endswith(f".{name}")), "")
    return f"nearest: {key}" if key else suggest(name, [*SECTIONS, GROUPS], "sections")


def _nearest_in_section(key: str, keys: list[str]) -> str:
    """Return the hint for an unknown key: the same key in another section, else the nearest in its own."""
    elsewhere = next((dotted for dotted in _all_keys() if dotted.endswith(f".{key}")), "")
    return f"nearest: {elsewhere}" if elsewhere and not nearest(key, keys) else suggest(key, keys, "keys")
