"""The sections of the configuration file: name, type, default, unit and meaning of every key.

Knows nothing about files or the machine. Invariant: a field with a `Key` is a key of the file with the same name (or
`Key.name`); its default applies if the key is not set; its value type accepts exactly the values of the field's type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from lucevisor.config.names import Environment, FilePath, VisibleDevice
from lucevisor.config.strict import AUTO, Choice, Line, OrAuto, Real, Several, Size, ValueType, Whole
from lucevisor.config.values import (
    BACKENDS,
    HUB_PREFIX,
    Auto,
    DeviceName,
    DeviceRef,
    HubFile,
    LayerSplit,
    RestartLimit,
    Restarts,
    Split,
    hub_file,
)

Backend = Literal["cpu", "cuda", "hip"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KvDType = Literal["auto", "float32", "float16", "bfloat16", "q8_0"]
AutoWord = Literal["auto"]

USUAL_CHUNK: Final = 512
"""Tokens of an automatic prefill chunk where a longer one gains nothing or does not fit."""
Goal = Literal["latency", "throughput"]
Normalise = Literal["off", "fix", "move"]
NORMALISE: tuple[Normalise, ...] = ("off", "fix", "move")
GOALS: tuple[Goal, ...] = ("latency", "throughput")

_RESTART_LIMIT = RestartLimit(10, 60)
_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "hip": "HIP_VISIBLE_DEVICES"}


@dataclass(frozen=True, slots=True)
class Key:
    """The value type and documentation of one key."""

    kind: ValueType[Any]
    text: str
    unit: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model to serve: one GGUF file."""

    path: Annotated[
        str,
        Key(
            FilePath(may_be_empty=False, hub=True),
            "The GGUF file, the first part of a split one, or a file on the Hugging Face hub. "
            "Relative to the directory of this file.",
        ),
    ]
    name: Annotated[
        str, Key(Line(), "The model's id in `/v1/models`. Empty: `general.name` of the file, else its stem.")
    ] = ""
    chat_template: Annotated[
        str,
        Key(
            FilePath(),
            "A file with a Jinja chat template, in place of the one in the model's file. Relative to the directory of "
            "this file. Empty: the model's own.",
        ),
    ] = ""
    yarn_attn_factor: Annotated[
        Literal["default", "file"],
        Key(
            Choice(("default", "file")),
            "Attention factor of models with YaRN (Laguna): `default` is 0.1 ln(factor) + 1, `file` the value in the "
            "model file.",
        ),
    ] = "default"

    @property
    def source(self) -> Path | HubFile:
        """Where the file is: a local path, or a file on the hub."""
        return source_of(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """A backend group: the devices that one Python interpreter can use, served by one shard daemon. `NAME` is yours: 1
    to 32 of `a-z 0-9 _ -`; a group named `cpu`, `cuda` or `hip` must have that backend."""

    name: str
    backend: Annotated[Backend, Key(Choice(BACKENDS), "The accelerator stack of the group's torch build.")]
    python: Annotated[
        str,
        Key(
            FilePath(command=True),
            "The group's interpreter, in an environment with torch, numpy, gguf and msgspec. A bare name is looked up "
            "on PATH; a path is relative to the directory of this file. Empty: the supervisor's own interpreter.",
        ),
    ] = ""
    env: Annotated[
        Mapping[str, str], Key(Environment(), "Environment variables for the daemon, added to the supervisor's.")
    ] = field(default_factory=lambda: MappingProxyType({}))
    visible_devices: Annotated[
        tuple[str, ...],
        Key(
            Several(VisibleDevice()),
            "Devices visible to the daemon, by number or UUID, passed on as `CUDA_VISIBLE_DEVICES` or "
            "`HIP_VISIBLE_DEVICES`; index 0 in `target_devices` is the first of them. Empty: those visible to the "
            "supervisor. Backends cuda and hip.",
        ),
    ] = ()
    threads: Annotated[
        int | AutoWord,
        Key(
            OrAuto(Whole(1, 1024)),
            "Compute threads of the daemon. `auto`: as many as `cores`, else an equal share of the usable cores per "
            "cpu group. Backend cpu.",
        ),
    ] = "auto"
    cores: Annotated[
        tuple[int, ...],
        Key(
            Several(Whole(0, 8191)),
            "Processor cores the daemon is pinned to. Empty: not pinned, but where cpu groups have as many threads as "
            "there are cores, that of the last layers has some of its own.",
        ),
    ] = ()

    def environment(self) -> dict[str, str]:
        """Return what to add to the daemon's environment: `env`, and the variable for `visible_devices`."""
        variable = visible_devices_variable(self.backend)
        if not self.visible_devices or not variable:
            return dict(self.env)
        return {**self.env, variable: ",".join(self.visible_devices)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Which devices hold which layers."""

    devices: Annotated[
        tuple[DeviceRef, ...],
        Key(
            Several(DeviceName(), distinct=False),  # duplicates are detected once groups are known
            "Devices in layer order; each holds one contiguous range of layers. All indices of a cpu group share one "
            "memory, so `left:0` and `left:1` are two shards in one process. Empty: all devices of all groups, in the "
            "order of this file.",
            name="target_devices",
        ),
    ] = ()
    split: Annotated[
        Split,
        Key(
            LayerSplit(),
            "How many layers each device of `target_devices` holds. Weights are shares and need not add up to 1; "
            'ranges name the layers: `["0-4", "4-8"]` is layers 0 to 3, then 4 to 7. `"auto"`: the planner chooses, '
            "by free memory and the speed of each device, which the first start with a model measures.",
            name="target_layer_split",
        ),
    ] = field(default=Auto())
    goal: Annotated[
        Goal,
        Key(
            Choice(GOALS),
            'What `target_layer_split = "auto"` minimises: `latency` the time of one request through all devices, '
            "`throughput` the time of the slowest stage, which limits the throughput of many requests.",
        ),
    ] = "latency"

    def split_text(self) -> str:
        """Return the split in the form of `--set placement.target_layer_split=`."""
        written = LayerSplit().write(self.split)
        return ",".join(str(part) for part in written) if isinstance(written, list) else str(written)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Number formats, context length and concurrency."""

    dtype: Annotated[
        DType,
        Key(
            Choice((AUTO, "float32", "bfloat16", "float16")),
            "Type of activations and arithmetic, one for the whole pipeline. `auto`: chosen by the planner for the "
            "given devices. On a cpu, `bfloat16` rounds activations to 8 bits for products of quantised matrices.",
        ),
    ] = "auto"
    kv_dtype: Annotated[
        KvDType,
        Key(
            Choice((AUTO, "float32", "float16", "bfloat16", "q8_0")),
            "Type of keys and values in the pages. `auto`: as `dtype`.",
        ),
    ] = "auto"
    max_context: Annotated[
        int | AutoWord,
        Key(
            OrAuto(Whole(1, 2**30)),
            "Longest sequence, prompt and answer together. `auto`: the model's own limit, or what the pages hold.",
            "tokens",
        ),
    ] = "auto"
    max_sequences: Annotated[
        int, Key(Whole(1, 4096), "Sequences that run concurrently; others wait in the queue.", "sequences")
    ] = 8
    prefill_chunk: Annotated[
        int | AutoWord,
        Key(
            OrAuto(Whole(1, 2**20)),
            "Longest slice of a prompt in one step; while others decode slices are shorter, by what steps take. "
            "`auto`: 2048 on GPUs with memory for it, else 512.",
            "tokens",
        ),
    ] = "auto"
    pages: Annotated[
        int | AutoWord,
        Key(
            OrAuto(Whole(1, 2**31 - 1)),
            "Pages of 64 tokens in each pool. `auto`: as many as sequences and prefix slots can use, and as devices' "
            "free memory allows; on a cpu a quarter of the usable memory, or one sequence.",
            "pages",
        ),
    ] = "auto"
    swap_space: Annotated[
        int,
        Key(
            Size(),
            "Most host memory for what preempted requests have computed, so that they go on where they were; 0: they "
            "compute it again.",
            "bytes",
        ),
    ] = 4 * 2**30

    @property
    def least_chunk(self) -> int:
        """The prefill chunk; where it is automatic, the one that memory does not matter for."""
        return USUAL_CHUNK if self.prefill_chunk == "auto" else self.prefill_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Reuse of computed prompts, in memory and on disk. Except for `normalise` it never changes answers. See
    docs/prefix-cache.md.
    """

    prefix_slots: Annotated[int, Key(Whole(0, 2**20), "Prompt prefixes kept in memory; 0 is off.", "slots")] = 32
    memory: Annotated[
        int,
        Key(
            Size(),
            "Total memory of prefix slots over all devices: pages that no running request uses, and checkpoints of "
            "recurrent layers, which are reserved at start.",
            "bytes",
        ),
    ] = 2**30
    states: Annotated[
        Literal["device", "host"],
        Key(
            Choice(("device", "host")),
            "Where checkpoints of recurrent layers are kept. `host`: in host memory, and copied when a slot is made or "
            "used; the devices hold the states of running sequences only. Pages stay on the devices.",
        ),
    ] = "device"
    dir: Annotated[
        str, Key(FilePath(), "Directory for snapshots, which survive a restart. Empty: none are written.")
    ] = ""
    disk: Annotated[int, Key(Size(), "Total size of snapshots.", "bytes")] = 20 * 2**30
    min_tokens: Annotated[int, Key(Whole(0, 2**30), "Shorter prefixes are not cached.", "tokens")] = 256
    checkpoint_pages: Annotated[
        int,
        Key(
            Whole(0, 2**20),
            "For models with recurrent layers: a prompt without chat turns is checkpointed at its last multiple of so "
            "many pages of 64 tokens; 0: at its end only.",
            "pages",
        ),
    ] = 4
    normalise: Annotated[
        Normalise,
        Key(
            Choice(NORMALISE),
            "What to do with system prompt lines that some agents change every turn, such as a date or a billing "
            "header: `off` nothing; `fix` replaces their values by fixed words, so the model does not see them; `move` "
            "moves dates behind the last message.",
        ),
    ] = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """What happens when a daemon dies."""

    hold_s: Annotated[
        float,
        Key(
            Real(0.0, 86400.0),
            "How long running requests wait for a daemon to come back; 0: they fail immediately.",
            "seconds",
        ),
    ] = 120.0
    journal: Annotated[
        int, Key(Size(), "Host memory for boundary activations, from which a lost shard is rebuilt.", "bytes")
    ] = 2 * 2**30
    spares: Annotated[
        int,
        Key(
            Whole(0, 8),
            "Daemons per group kept running without weights, so that a restart only loads the weights.",
            "daemons",
        ),
    ] = 0
    restart_limit: Annotated[
        RestartLimit,
        Key(
            Restarts(),
            "Most restarts of one group in a period; after one more the group is FAILED and tried again after 1 "
            "minute, then 2, 4, up to an hour; `lucevisor restart` tries at once. 0: it stays FAILED.",
        ),
    ] = _RESTART_LIMIT


def source_of(path: str) -> Path | HubFile:
    """Return where a model's file is: a local path, or a file on the hub."""
    return hub_file(path) if path.startswith(HUB_PREFIX) else Path(path)


def visible_devices_variable(backend: Backend) -> str:
    """Return the environment variable that limits the devices torch sees, empty if the backend has none."""
    return _VISIBLE_DEVICES.get(backend, "")
