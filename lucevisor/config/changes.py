"""Which keys differ between two configurations, and overrides that replace others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lucevisor.config.schema import GROUPS, Config


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
    """Return values by dotted key."""
    sections: dict[str, Any] = config.as_dict()
    groups = {f"{GROUPS}.{name}": keys for name, keys in sections.pop(GROUPS).items()}
    return {f"{name}.{key}": value for name, keys in {**sections, **groups}.items() for key, value in keys.items()}
