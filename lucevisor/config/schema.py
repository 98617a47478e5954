"""The config schema: all sections and their keys, and `Config`, the result of `load`.

`load` parses by `SECTIONS` and `keys_of`, `docs` prints them, and a test compares etc/lucevisor.toml with them. Knows
nothing about files or the machine. Invariant: loading `as_dict` of a Config gives an equal Config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from lucevisor.config.draft import DraftConfig
from lucevisor.config.kvflash import KvFlashConfig
from lucevisor.config.log import LogConfig
from lucevisor.config.pflash import PFlashConfig
from lucevisor.config.sections import (
    CacheConfig,
    EngineConfig,
    GroupConfig,
    Key,
    ModelConfig,
    PlacementConfig,
    RecoveryConfig,
)
from lucevisor.config.server import ServerConfig
from lucevisor.config.values import Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A complete, resolved and valid configuration. Two are equal if they mean the same, wherever they came from."""

    file: Path = field(compare=False)
    model: ModelConfig
    groups: Mapping[str, GroupConfig]
    placement: PlacementConfig
    engine: EngineConfig = field(default=EngineConfig())
    server: ServerConfig = field(default=ServerConfig())
    cache: CacheConfig = field(default=CacheConfig())
    draft: DraftConfig = field(default=DraftConfig())
    kvflash: KvFlashConfig = field(default=KvFlashConfig())
    pflash: PFlashConfig = field(default=PFlashConfig())
    recovery: RecoveryConfig = field(default=RecoveryConfig())
    log: LogConfig = field(default=LogConfig())
    set_keys: frozenset[str] = field(default=frozenset(), compare=False)
    notices: tuple[Notice, ...] = field(default=(), compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)  # of the command line: `load` takes them again

    def as_dict(self) -> dict[str, object]:
        """Return all keys and values as in the file, JSON-compatible; loading it gives an equal configuration."""
        sections: dict[str, object] = {}
        for name in SECTIONS:
            sections[name] = _written(getattr(self, name))
            if name == "model":
                sections[GROUPS] = {group.name: _written(group) for group in self.groups.values()}
        return sections

    @property
    def scores(self) -> bool:
        """Whether the scoring model of `[pflash]` is asked, by PFlash or by KV Flash."""
        return self.pflash.mode != "off" or (self.kvflash.policy == "drafter" and self.kvflash.pool_tokens != 0)

    def threads_of(self, group: str, usable_cores: int) -> int:
        """Return the compute threads of a cpu group on a machine where the supervisor may use `usable_cores`."""
        config = self.groups[group]
        if config.threads != "auto":
            return config.threads
        n_cpu_groups = sum(other.backend == "cpu" for other in self.groups.values())
        return len(config.cores) or max(1, usable_cores // max(1, n_cpu_groups))


GROUPS = "groups"
SECTIONS: Mapping[str, type[Any]] = {
    "model": ModelConfig,
    "placement": PlacementConfig,
    "engine": EngineConfig,
    "server": ServerConfig,
    "cache": CacheConfig,
    "draft": DraftConfig,
    "kvflash": KvFlashConfig,
    "pflash": PFlashConfig,
    "recovery": RecoveryConfig,
    "log": LogConfig,
}
"""Sections by their names in the file, in its order; `[groups.NAME]`, one GroupConfig each, comes after model."""


@dataclass(frozen=True, slots=True)
class FieldKey:
    """One key of a section: its field, its `Key`, and its default (`dataclasses.MISSING` if the key is required)."""

    field: str
    key: Key
    default: Any

    @property
    def required(self) -> bool:
        """Whether the file must contain the key."""
        return self.default is dataclasses.MISSING


def _keys_in(section: type[Any]) -> Mapping[str, FieldKey]:
    """Return the keys of a section class by their names in the file, in order."""
    hints = get_type_hints(section, include_extras=True)
    keys: dict[str, FieldKey] = {}
    for each in dataclasses.fields(section):
        notes = [note for note in getattr(hints[each.name], "__metadata__", ()) if isinstance(note, Key)]
        if notes:
            made = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            keys[notes[0].name or each.name] = FieldKey(each.name, notes[0], made)
    return MappingProxyType(keys)


_KEYS = {section: _keys_in(section) for section in (*SECTIONS.values(), GroupConfig)}


def keys_of(section: type[Any]) -> Mapping[str, FieldKey]:
    """Return the keys of a section class by their names in the file, in order."""
    return _KEYS[section]


def _written(section: object) -> dict[str, object]:
    """Return a section's keys and values as written in the file."""
    return {name: each.key.kind.write(getattr(section, each.field)) for name, each in keys_of(type(section)).items()}
