"""Options that have no effect beside other settings.  None is ignored silently.

Invariant: every key of `INERT` whose condition holds is returned by `not_yet_effective` when the user sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lucevisor.config.schema import GROUPS, SECTIONS, Config, FieldKey, keys_of
from lucevisor.config.values import Auto, Notice, WeightedSplit, is_loopback


@dataclass(frozen=True, slots=True)
class Inert:
    """Keys without effect beside another setting: which, when, why, and how to give them effect."""

    keys: tuple[str, ...]
    when: Callable[[Config], bool]
    why: str
    hint: str


INERT: tuple[Inert, ...] = (
    Inert(
        ("placement.target_layer_split",),
        lambda config: len(config.placement.devices) == 1 and isinstance(config.placement.split, WeightedSplit),
        "has no effect: one device holds all layers",
        "remove the key, or add a device to placement.target_devices",
    ),
    Inert(
        ("placement.goal",),
        lambda config: len(config.placement.devices) == 1 or not isinstance(config.placement.split, Auto),
        'has no effect: it applies only with placement.target_layer_split = "auto" and two or more devices',
        "remove the key",
    ),
    Inert(
        ("server.allow_open",),
        lambda config: is_loopback(config.server.host) or bool(config.server.api_keys_file),
        "has no effect: it applies only if other machines can reach server.host and no server.api_keys_file is set",
        "remove the key",
    ),
    Inert(
        ("cache.memory", "cache.states", "cache.min_tokens", "cache.checkpoint_pages", "cache.dir", "cache.disk"),
        lambda config: config.cache.prefix_slots == 0,
        "has no effect while cache.prefix_slots is 0",
        "remove the key, or set cache.prefix_slots",
    ),
    Inert(
        ("engine.swap_space",),
        lambda config: config.cache.prefix_slots == 0 and config.engine.swap_space != 0,
        "has no effect while cache.prefix_slots is 0: preempted requests compute again",
        "remove the key, or set cache.prefix_slots",
    ),
    Inert(
        ("cache.disk",),
        lambda config: not config.cache.dir,
        "has no effect while cache.dir is empty",
        "remove the key, or set cache.dir",
    ),
    Inert(
        ("draft.path", "draft.device", "draft.width"),
        lambda config: config.draft.kind == "off",
        "has no effect while draft.kind is off",
        "remove the key, or set draft.kind",
    ),
    Inert(
        ("draft.path", "draft.device"),
        lambda config: config.draft.kind == "lookup",
        "has no effect: the lookup drafter needs no model",
        "remove the key, or set draft.kind to auto",
    ),
    Inert(
        ("kvflash.policy", "kvflash.host", "kvflash.tau"),
        lambda config: config.kvflash.pool_tokens == 0,
        "has no effect while kvflash.pool_tokens is 0",
        "remove the key, or set kvflash.pool_tokens",
    ),
    Inert(
        ("recovery.journal",),
        lambda config: config.recovery.hold_s == 0 and config.recovery.journal != 0,
        "has no effect while recovery.hold_s is 0",
        "remove the key, or set recovery.hold_s",
    ),
    Inert(
        ("kvflash.tau",),
        lambda config: config.kvflash.policy != "qk",
        "has no effect: this kvflash.policy makes no selections while it answers",
        "remove the key",
    ),
    Inert(
        ("kvflash.host",),
        lambda config: config.kvflash.policy == "lru",
        "has no effect: policy lru keeps no page in host memory",
        "remove the key",
    ),
    Inert(
        ("pflash.path", "pflash.device", "pflash.window"),
        lambda config: not config.scores,
        "has no effect while pflash.mode is off",
        "remove the key, or set pflash.mode",
    ),
    Inert(
        ("pflash.threshold", "pflash.keep_ratio", "pflash.curve"),
        lambda config: config.pflash.mode == "off",
        "has no effect while pflash.mode is off",
        "remove the key, or set pflash.mode",
    ),
    Inert(
        ("pflash.threshold",),
        lambda config: config.pflash.mode == "always",
        "has no effect while pflash.mode is always",
        "remove the key, or set pflash.mode to auto",
    ),
    Inert(
        ("pflash.keep_ratio",),
        lambda config: bool(config.pflash.curve) and config.pflash.mode != "off",
        "has no effect beside pflash.curve",
        "remove one of the two",
    ),
)
"""Options that depend on others; reported if they are set to something other than their default."""

CPU_ONLY = ("threads",)
GPU_ONLY = ("visible_devices",)


def not_yet_effective(config: Config) -> list[Notice]:
    """Return a notice for each option that the user set and that has no effect, in the order of the file."""
    notices: dict[str, Notice] = {}
    for notice in (*_inert(config), *_inert_in_groups(config)):
        notices.setdefault(notice.key, notice)
    sections = ["model", GROUPS, *SECTIONS]
    return sorted(notices.values(), key=lambda notice: sections.index(notice.key.partition(".")[0]))


def field_key(key: str) -> FieldKey:
    """Return the schema's entry for a dotted key such as `server.port`; raises KeyError."""
    section, _, name = key.partition(".")
    return keys_of(SECTIONS[section])[name]


def _written(config: Config, key: str) -> object:
    each = field_key(key)
    return each.key.kind.write(_value(config, key))


def _value(config: Config, key: str) -> object:
    value: object = getattr(getattr(config, key.partition(".")[0]), field_key(key).field)
    return value


def _inert(config: Config) -> Iterator[Notice]:
    for row in INERT:
        if row.when(config):
            for key in row.keys:
                if key in config.set_keys and _value(config, key) != field_key(key).default:
                    yield Notice(key=key, value=_written(config, key), why=row.why, hint=row.hint)


def _inert_in_groups(config: Config) -> Iterator[Notice]:
    for group in config.groups.values():
        on_cpu = group.backend == "cpu"
        for name in GPU_ONLY if on_cpu else CPU_ONLY:
            key, each = f"{GROUPS}.{group.name}.{name}", keys_of(type(group))[name]
            value = getattr(group, each.field)
            if key in config.set_keys and value != each.default:
                meant_for = "cuda and hip" if on_cpu else "cpu"
                why = f"has no effect on a group with backend {group.backend}: it is for {meant_for}"
                yield Notice(key=key, value=each.key.kind.write(value), why=why, hint="remove the key")
