"""Loads a TOML file with `--set` overrides into a `Config`, or raises ConfigError with every fault of the file."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from lucevisor.config.checks import OVERRIDE, PendingConfig, check_values, unused_settings, used_groups
from lucevisor.config.formats import GROUP_NAME, PATH, InvalidValue, absolute, kind_of, line
from lucevisor.config.schema import Text, keys_of, plain
from lucevisor.config.sections import (
    GROUPS,
    LORA,
    MODELS,
    PER_MODEL,
    REPLICAS,
    SECTIONS,
    Config,
    GroupConfig,
    LoraConfig,
    Notice,
    ReplicaConfig,
    file_key,
)
from lucevisor.errors import NO_VALUE, ConfigError, ConfigErrors, nearest, show, suggest

MAX_FILE_BYTES: Final = 64 * 1024
"""Time and memory of tomllib grow with the square of the parts of a dotted name."""
_MAX_OVERRIDES = 256


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in the file at `path`, with `KEY=VALUE` overrides on top. Raises ConfigError."""
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
    """Return the configuration in a tree read by tomllib from `file` (absolute). Raises ConfigError."""
    pending = PendingConfig(file=shown_as or str(file))
    sections = _overridden(tree, overrides, pending)
    found = _with_files_of_folder(pending, sections, file)
    config = _read_models(pending, sections, file) if MODELS in sections else _read(pending, sections, file)
    if config is None:
        raise pending.errors[0] if len(pending.errors) == 1 else ConfigErrors(pending.errors)
    return dataclasses.replace(config, overrides=tuple(overrides), found=frozenset(found))


_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
_FIRST_PART = re.compile(r"-00001-of-\d{5}$")


def _stem(path: Path) -> str:
    return _FIRST_PART.sub("", path.stem)


def _with_files_of_folder(pending: PendingConfig, sections: dict[str, object], file: Path) -> list[str]:
    """Add a model for each GGUF file of `server.models_dir`; return the names of their sections."""
    server, models = sections.get("server"), sections.get(MODELS, {})
    written = server.get("models_dir") if isinstance(server, dict) else None
    if not isinstance(written, str) or not written or not isinstance(models, dict):
        return []
    try:
        folder = Path(absolute(str(written), file.parent, PATH))
        files = sorted(path for pattern in ("*.gguf", "*/*.gguf") for path in folder.glob(pattern) if path.is_file())
    except (InvalidValue, OSError):
        return []  # the key is checked with all others
    hint = "name a folder with GGUF files"
    if not folder.is_dir():
        pending.refuse("server.models_dir", str(written), "is no folder", hint)
    tables = {name: table for name, table in models.items() if isinstance(table, dict) and "path" in table}
    own = {str(file.parent / os.path.expanduser(str(table["path"]))) for table in tables.values()}
    files = [
        path for path in files
        if str(path) not in own and "mmproj" not in path.name.lower() and not _LATER_PART.search(path.stem)
    ]  # fmt: skip
    ids = {str(table.get("name") or name) for name, table in tables.items()}
    n_files = Counter(_stem(path) for path in files)
    added: dict[str, object] = {}
    for path in files:
        stem = _stem(path)
        if path.parent != folder and (n_files[stem] > 1 or stem in ids):
            stem = f"{path.parent.name}/{stem}"
        try:
            line(str(path)), line(stem)
            if stem in ids:
                raise InvalidValue(f"has the id of another model, {show(stem)}")
        except InvalidValue as error:
            why = f"has a file that is left out, as its name {error.why}: {show(str(path.relative_to(folder)))}"
            pending.notices.append(Notice(key="server.models_dir", value=written, why=why, hint="rename the file"))
            continue
        ids.add(stem)
        name = plain = re.sub(r"[^a-z0-9_-]", "-", stem.lower())[:28] or "model"
        for n in count(2):
            if name not in models and name not in added:
                break
            name = f"{plain}-{n}"
        added[name] = {"path": str(path), "name": stem, "preload": False}
    if folder.is_dir() and not files and not models:
        pending.refuse("server.models_dir", str(written), "has no GGUF files", hint)
    sections[MODELS] = {**models, **added}
    return [*added]


def _read(pending: PendingConfig, sections: Mapping[str, object], file: Path) -> Config | None:
    """Return the configuration of one model; None after adding errors."""
    for name in sections:
        if name not in SECTIONS and name not in (GROUPS, REPLICAS, LORA):
            pending.refuse(name, sections[name], "is not a section", _nearest_section(name))
    for name, section in SECTIONS.items():
        _read_section(pending, name, section, sections.get(name, {}), file.parent)
        if name == "model":
            if sections.get(GROUPS, {}) == {}:
                hint = f"add [{GROUPS}.NAME] with backend = cpu, cuda or hip for each interpreter"
                pending.refuse(GROUPS, NO_VALUE, "is missing", hint)
            for tables, noun, key, kind, names in (
                (GROUPS, "a group", "backend", GroupConfig, pending.group_names),
                (REPLICAS, "a replica", "groups", ReplicaConfig, pending.replica_names),
                (LORA, "an adapter", "path", LoraConfig, pending.adapter_names),
            ):
                hint = f"write [{tables}.NAME] and {key} = below it"
                names += _read_named(pending, tables, noun, kind, sections.get(tables, {}), file.parent, hint)
    check_values(pending)
    return None if pending.errors else _build(pending, file)


def _read_models(pending: PendingConfig, sections: Mapping[str, object], file: Path) -> Config | None:
    """Return the configuration of `[models.NAME]`: each is read as if it were the only one, with the sections of the
    file as its defaults; None after adding errors."""
    models = sections[MODELS]
    if REPLICAS in sections:
        hint = f"remove [{REPLICAS}], or serve each model with a supervisor of its own"
        pending.refuse(REPLICAS, NO_VALUE, f"is beside [{MODELS}.NAME], and replicas are of one model", hint)
    if LORA in sections:
        hint = f"write [{MODELS}.NAME.{LORA}.ADAPTER] for the model that it is of"
        pending.refuse(LORA, NO_VALUE, f"is beside [{MODELS}.NAME]", hint)
    if "model" in sections:
        hint = f"write [{MODELS}.NAME] for this one, too, or remove [{MODELS}] and server.models_dir"
        pending.refuse("model", NO_VALUE, f"is beside [{MODELS}.NAME]", hint)
    if not isinstance(models, dict) or not models:
        why = "has no models" if models == {} else f"is {kind_of(models)}, not a table"
        pending.refuse(MODELS, models, why, f"write [{MODELS}.NAME] and path = below it")
        return None
    common = {name: table for name, table in sections.items() if name not in (MODELS, REPLICAS, LORA, "model")}
    configs: dict[str, Config] = {}
    for name, own in models.items():
        section = f"{MODELS}.{name}"
        if not GROUP_NAME.fullmatch(name):
            hint = f"such as small; `name` below [{MODELS}.NAME] is the id for clients"
            pending.refuse(section, NO_VALUE, "is not the name of a section: use 1 to 32 of a-z 0-9 _ -", hint)
        elif not isinstance(own, dict):
            pending.refuse(section, own, f"is {kind_of(own)}, not a table", f"write [{section}] and its keys below it")
        elif (config := _read_model(pending, section, own, common, file)) is not None:
            configs[name] = config
    if pending.errors:
        return None
    _check_models(pending, configs)
    first = next(iter(configs.values()))
    of_models = [notice for config in configs.values() for notice in config.notices]
    notices = tuple({str(notice): notice for notice in (*pending.notices, *of_models)}.values())
    configs = {name: dataclasses.replace(config, groups=used_groups(config)) for name, config in configs.items()}
    several = dataclasses.replace(
        first, models=MappingProxyType(configs), notices=notices, section="", own_keys=frozenset()
    )
    return None if pending.errors else several


def _read_model(
    pending: PendingConfig, section: str, own: Mapping[str, object], common: Mapping[str, object], file: Path
) -> Config | None:
    """Return the configuration of one of several models; None after adding its errors to `pending`."""
    inner = PendingConfig(file=pending.file, one_of_several=True)
    name, sections = section.partition(".")[2], dict(common)
    own_tables = (*PER_MODEL, LORA)
    sections["model"] = {"name": name, **{key: value for key, value in own.items() if key not in own_tables}}
    sections[LORA] = own.get(LORA, {})
    own_keys = {f"model.{key}" for key in own if key not in own_tables}
    for part in PER_MODEL:
        table, shared = own.get(part, {}), common.get(part, {})
        if isinstance(table, dict) and isinstance(shared, dict):
            sections[part] = {**shared, **table}
            own_keys |= {f"{part}.{key}" for key in table}
        elif part in own:
            sections[part] = table
            own_keys.add(part)
    cache = sections.get("cache")
    if isinstance(cache, dict) and "cache.dir" not in own_keys and isinstance(folder := cache.get("dir"), str):
        sections["cache"] = {**cache, "dir": type(folder)(f"{folder}/{name}") if folder else folder}
    config = _read(inner, sections, file)
    known = {str(error) for error in pending.errors}
    for error in inner.errors:
        key = file_key(error.key, section, own_keys)
        origin = OVERRIDE if {key, error.key} & pending.overridden else error.file
        why, hint = (text.replace("[model]", f"[{section}]") for text in (error.why, error.hint))
        named = ConfigError(key, error.value, why, hint, file=origin)
        if str(named) not in known:  # of a section for all models
            pending.errors.append(named)
    if config is None:
        return None
    config = dataclasses.replace(config, section=section, own_keys=frozenset(own_keys))
    return dataclasses.replace(config, notices=(*inner.notices, *unused_settings(config)))


def _check_models(pending: PendingConfig, configs: Mapping[str, Config]) -> None:
    """Check the models against each other: their ids, and that each group has something to do."""
    ids: dict[str, str] = {}
    for name, config in configs.items():
        if other := ids.get(config.model.name):
            why = f"is the id of [{MODELS}.{other}], too"
            pending.refuse(f"{MODELS}.{name}.name", config.model.name, why, "give each model its own")
        ids[config.model.name] = name
        for adapter in config.lora:
            key = f"{MODELS}.{name}.{LORA}.{adapter}"
            if other := ids.get(adapter):
                pending.refuse(key, NO_VALUE, f"is an id of [{MODELS}.{other}], too", "give each its own")
            ids[adapter] = name
    used = {group for config in configs.values() for group in used_groups(config)}
    for group in next(iter(configs.values())).groups:
        if group not in used:
            why = "has no device in placement.target_devices of any model: its daemon would have nothing to do"
            hint = f"add {group}:0 to [{MODELS}.NAME.placement] target_devices, or remove [{GROUPS}.{group}]"
            pending.refuse(f"{GROUPS}.{group}", NO_VALUE, why, hint)


def renamed_errors(error: ConfigError, config: Config) -> list[ConfigError]:
    """Return errors whose keys are as of a lone model, with the names that the keys have in the file."""
    return [
        ConfigError(config.key(one.key), one.value, one.why, one.hint, file=one.file) if config.section else one
        for one in error.errors
    ]


def single_model(config: Config, command: str) -> Config:
    """Return ``config``; raises ConfigError if it has several models or replicas, of which a command runs one."""
    if config.replicas:
        hint = f"write a file without [{REPLICAS}], with the groups of the one that is meant"
        why = f"are replicas, and `lucevisor {command}` runs one"
        raise ConfigError(REPLICAS, list(config.replicas), why, hint, file=str(config.file))
    if config.models:
        hint = "write a file with [model] for the one that is meant"
        why = f"are several models, and `lucevisor {command}` runs one"
        raise ConfigError(MODELS, list(config.models), why, hint, file=str(config.file))
    return config


def changed_keys(before: Config, after: Config) -> list[str]:
    """Return the dotted keys whose values differ; `groups.NAME` and `models.NAME` for one that only one of them has."""
    old, new = _flat(before), _flat(after)
    of_one = [f"{GROUPS}.{name}" for name in sorted(before.groups.keys() ^ after.groups.keys())]
    of_one += [f"{MODELS}.{name}" for name in sorted(before.models.keys() ^ after.models.keys())]
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    prefixes = tuple(f"{name}." for name in of_one)
    return [key for key in differing if not key.startswith(prefixes)] + of_one


def merge_overrides(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return `KEY=VALUE` overrides in which those of `later` replace the earlier ones of the same key."""
    keys = {override.partition("=")[0] for override in later}
    return [*(override for override in earlier if override.partition("=")[0] not in keys), *later]


def _flat(config: Config) -> Mapping[str, Any]:
    sections: dict[str, Any] = config.as_dict()
    groups = {f"{GROUPS}.{name}": keys for name, keys in sections.pop(GROUPS).items()}
    groups |= {f"{REPLICAS}.{name}": keys for name, keys in sections.pop(REPLICAS, {}).items()}
    groups |= {f"{LORA}.{name}": keys for name, keys in sections.pop(LORA, {}).items()}
    for name, keys in sections.pop(MODELS, {}).items():
        groups |= {f"{MODELS}.{name}.{LORA}.{one}": own for one, own in keys.pop(LORA, {}).items()}
        sections |= {f"{MODELS}.{name}.{part}": keys.pop(part) for part in PER_MODEL}
        sections[f"{MODELS}.{name}"] = keys
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
        if parts[0] not in SECTIONS and parts[0] not in (GROUPS, MODELS, REPLICAS, LORA) and len(parts) > 1:
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
    if parts[0] in (REPLICAS, LORA):
        return len(parts) == 3
    if parts[0] == MODELS:
        return (len(parts), *parts[2:3]) == (5, LORA) or len(parts) == 3 or (len(parts) == 4 and parts[2] in PER_MODEL)
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


def _read_named(
    pending: PendingConfig, prefix: str, noun: str, section: type[Any], tables: object, folder: Path, hint: str
) -> list[str]:
    """Read sections whose names are the user's; return the names that may be."""
    if not isinstance(tables, dict):
        pending.refuse(prefix, tables, f"is {kind_of(tables)}, not a table", hint)
        return []
    names = []
    for name, table in tables.items():
        if GROUP_NAME.fullmatch(name):
            names.append(name)
            _read_section(pending, f"{prefix}.{name}", section, table, folder)
            continue
        near = "".join(letter for letter in name.lower()[:32] if GROUP_NAME.fullmatch(letter))
        hint = f"nearest: {near}" if near else "such as left"
        pending.refuse(f"{prefix}.{name}", NO_VALUE, f"is not {noun} name: use 1 to 32 of a-z 0-9 _ -", hint)
    return names


def _read_section(pending: PendingConfig, name: str, section: type[Any], table: object, folder: Path) -> None:
    """Read the keys of one section into `pending.values`, defaults included."""
    if not isinstance(table, dict):
        pending.refuse(name, table, f"is {kind_of(table)}, not a table", f"write [{name}] and its keys below it")
        return
    keys = keys_of(section)
    for key in table:
        if key not in keys:
            # The same key in another section, else the nearest in its own.
            elsewhere = next((dotted for dotted in _all_keys() if dotted.endswith(f".{key}")), "")
            use_other = elsewhere and not nearest(key, keys)
            hint = f"nearest: {elsewhere}" if use_other else suggest(key, list(keys), "keys")
            pending.refuse(f"{name}.{key}", table[key], f"is not a key of [{name}]", hint)
    for key, field_key in keys.items():
        dotted = f"{name}.{key}"
        if key in table:
            pending.set_keys.add(dotted)
            try:
                pending.values[dotted] = field_key.read(table[key], folder)
            except InvalidValue as error:
                pending.refuse(dotted, error.value, error.why, error.hint, inside=error.inside)
        elif field_key.required:
            hint = f"add {key} = under [{name}]: {plain(field_key.allowed)}"
            pending.refuse(dotted, NO_VALUE, "is missing", hint)
        else:
            pending.values[dotted] = field_key.default


def _build(pending: PendingConfig, file: Path) -> Config:
    """Return the Config of valid values."""

    def make(name: str, section: type[Any], /, **more: object) -> Any:
        keys = keys_of(section)
        return section(**more, **{keys[key].field: pending.values[f"{name}.{key}"] for key in keys})

    groups = {name: make(f"{GROUPS}.{name}", GroupConfig, name=name) for name in pending.group_names}
    replicas = {name: make(f"{REPLICAS}.{name}", ReplicaConfig, name=name) for name in pending.replica_names}
    adapters = {name: make(f"{LORA}.{name}", LoraConfig, name=name) for name in pending.adapter_names}
    config = Config(
        file=file,
        groups=MappingProxyType(groups),
        lora=MappingProxyType(adapters),
        replicas=MappingProxyType(replicas),
        set_keys=frozenset(pending.set_keys),
        **{name: make(name, section) for name, section in SECTIONS.items()},
    )
    return dataclasses.replace(config, notices=(*pending.notices, *unused_settings(config)))


def _all_keys() -> list[str]:
    named = {f"{GROUPS}.NAME": GroupConfig, f"{REPLICAS}.NAME": ReplicaConfig, f"{LORA}.NAME": LoraConfig}
    sections = {**SECTIONS, **named}
    return [f"{name}.{key}" for name, section in sections.items() for key in keys_of(section)]


def _nearest_section(name: str) -> str:
    """Return the hint for an unknown section: a key of that name, else similar sections."""
    key = next((dotted for dotted in _all_keys() if dotted.endswith(f".{name}")), "")
    return f"nearest: {key}" if key else suggest(name, [*SECTIONS, MODELS, GROUPS, REPLICAS, LORA], "sections")
