"""The sections of the configuration file with type, default, unit and meaning of every key, and `Config`.

A field is a key of the file with the same name, or `Key.name`; the text below it is on docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from lucevisor.config.formats import (
    AUTO_SIZE,
    COMMAND,
    CURVE_POINT,
    DESTINATION,
    DEVICE,
    ENVIRONMENT,
    GROUP,
    HOST,
    HUB_PATH,
    HUB_PREFIX,
    LINE,
    MODEL_PATH,
    OPTIONAL_DEVICE,
    OPTIONAL_HOST,
    ORIGIN,
    PATH,
    RESTART_LIMIT,
    SIZE,
    SPLIT,
    VISIBLE_DEVICE,
    WORD,
    Auto,
    DeviceRef,
    HubFile,
    RestartLimit,
    Split,
    WeightedSplit,
    hub_file,
    write_split,
)
from lucevisor.config.schema import Key, keys_of
from lucevisor.errors import format_error

Backend = Literal["cpu", "cuda", "hip"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KvDType = Literal["auto", "float32", "float16", "bfloat16", "q8_0"]
AutoWord = Literal["auto"]
Goal = Literal["latency", "throughput"]
Transport = Literal["shared_memory", "tcp"]

USUAL_CHUNK: Final = 512
"""Tokens of an automatic prefill chunk where a longer one gains nothing or does not fit."""
VISIBLE_DEVICES: Final = {"cpu": "", "cuda": "CUDA_VISIBLE_DEVICES", "hip": "HIP_VISIBLE_DEVICES"}
"""The environment variable that limits the devices torch sees, by backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model to serve: one GGUF file."""

    path: Annotated[str, MODEL_PATH]
    """The GGUF file, the first part of a split one, or a file on the Hugging Face hub. Relative to the directory of
    this file."""
    name: Annotated[str, LINE] = ""
    """The model's id in `/v1/models`. Empty: `general.name` of the file, else its stem."""
    chat_template: Annotated[str, PATH] = ""
    """A file with a Jinja chat template, in place of the one in the model's file. Relative to the directory of this
    file. Empty: the model's own."""
    aliases: Annotated[tuple[str, ...], LINE] = ()
    """Other names by which requests may ask for the model, also patterns: `["claude-*", "gpt-4o"]`. The id of a
    model comes first, then the longest matching pattern."""
    yarn_attn_factor: Literal["default", "file"] = "default"
    """Attention factor of models with YaRN (Laguna): `default` is 0.1 ln(factor) + 1, `file` the value in the model
    file."""
    memory_share: Annotated[Annotated[float, Meta(gt=0, le=1)] | AutoWord, Key()] = "auto"
    """With several models: the share of each device's memory that this one may use beside others on the device. `auto`:
    what the shares of others leave, in proportion to the sizes of the files."""

    preload: bool = True
    """Load the model at the start. `false`: when a request names it, in place of models that nobody uses if memory is
    short. Its `memory_share` is then the smallest of an eighth, a quarter, a half and all of the memory in which a
    context of 32,768 tokens fits. See docs/models-on-demand.md."""
    pin: bool = False
    """Keep the model loaded: it never makes room for others, and `ttl` does not unload it."""
    ttl: Annotated[float, Meta(ge=0.0, le=31536000.0), Key(unit="seconds")] = 0.0
    """Time without requests after which the model is unloaded, to be loaded again by the next request; 0: never. When
    all models of a group are due, its daemon ends and the devices are free."""

    @property
    def source(self) -> Path | HubFile:
        return source_of(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """A backend group: the devices that one Python interpreter can use, served by one shard daemon. `NAME` is yours: 1
    to 32 of `a-z 0-9 _ -`; a group named `cpu`, `cuda` or `hip` must have that backend."""

    name: str = field(metadata={"in_file": False})
    backend: Backend
    """The accelerator stack of the group's torch build."""
    python: Annotated[str, COMMAND] = ""
    """The group's interpreter, in an environment with torch, numpy, gguf and msgspec. A bare name is looked up on PATH;
    a path is relative to the directory of this file. Empty: the supervisor's own interpreter."""
    env: Annotated[Mapping[str, str], ENVIRONMENT] = field(default_factory=lambda: MappingProxyType({}))
    """Environment variables for the daemon, added to the supervisor's."""
    visible_devices: Annotated[tuple[str, ...], VISIBLE_DEVICE] = ()
    """Devices visible to the daemon, by number or UUID, passed on as `CUDA_VISIBLE_DEVICES` or `HIP_VISIBLE_DEVICES`;
    index 0 in `target_devices` is the first of them. Empty: those visible to the supervisor. Backends cuda and hip."""
    threads: Annotated[int, Meta(ge=1, le=1024)] | AutoWord = "auto"
    """Compute threads of the daemon. `auto`: as many as `cores`, else an equal share of the usable cores per cpu group.
    Backend cpu."""
    cores: tuple[Annotated[int, Meta(ge=0, le=8191)], ...] = ()
    """Processor cores the daemon is pinned to. Empty: not pinned."""
    host: Annotated[str, DESTINATION] = ""
    """Host to start the daemon on, as `cluster.launcher` finds it. Empty: this one. Needs `[cluster]`. `python` is an
    interpreter there, `python3` if it is empty; `env`, `visible_devices` and `cores` are about that host. What is
    needed of model files that are not at the same paths there comes from this host. See docs/cluster.md."""
    transport: Transport = "shared_memory"
    """Transport between the daemon, the supervisor and other groups. `tcp`: over connections on the loopback interface,
    or, with `[cluster]`, at its address; always with a `host`."""

    @property
    def host_name(self) -> str:
        """The host without a user's name; empty for the supervisor's own."""
        return self.host.rpartition("@")[2]

    @property
    def shares_memory(self) -> bool:
        """True if the daemon can be given descriptors."""
        return not self.host and self.transport == "shared_memory"

    def environment(self) -> dict[str, str]:
        """Return what to add to the daemon's environment: `env`, and the variable for `visible_devices`."""
        variable = VISIBLE_DEVICES[self.backend]
        shown = {variable: ",".join(self.visible_devices)} if self.visible_devices and variable else {}
        return {**self.env, **shown}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Daemons on other hosts, for groups with a `host`. See docs/cluster.md."""

    listen: Annotated[str, OPTIONAL_HOST] = ""
    """Address of this host that the others reach. Daemons connect to it. Empty: no port is open."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port to listen on; 0: any free one."""
    secret_file: Annotated[str, PATH] = ""
    """File with the cluster's secret, for its owner only (mode 0600), which `lucevisor cluster secret FILE` writes. The
    other hosts need a copy at the same path; a path in the home directory is one in that of the user there."""
    tls_cert_file: Annotated[str, PATH] = ""
    """Certificate in PEM, of any issuer and for any name: encrypts all connections. The other hosts need copies of it
    and its key, as of `secret_file`. Empty: they are authenticated, but not encrypted."""
    tls_key_file: Annotated[str, PATH] = ""
    """Private key of `tls_cert_file` in PEM, without a password."""
    cache_dir: Annotated[str, PATH] = ""
    """Directory on the other hosts for copies of model files that they do not have, as far as their layers need them. A
    path in the home directory is one in that of the user there. Empty: `~/.cache/lucevisor/models`."""
    launcher: Literal["ssh", "ray"] = "ssh"
    """How daemons are started on a `host`: by ssh, or as actors of a Ray cluster. For `ray`, `host` is the address or
    name of a node, resources (`GPU=1,amd=1`) that are reserved on one, or both (`10.0.0.2,GPU=1`)."""
    ssh: Annotated[tuple[str, ...], WORD] = (
        "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ConnectionAttempts=5",
        "-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3",
    )  # fmt: skip
    """Command of the launcher `ssh`; the host and what to run there follow. It must not ask for anything."""
    ray_address: Annotated[str, WORD] = "auto"
    """`HOST:PORT` of the head for the launcher `ray`. `auto`: the cluster of which this host is a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """A replica: the groups of one pipeline with all layers of the model. With replicas every group is in one of them;
    they serve the same endpoint. See docs/replicas.md. `NAME` is yours, as those of groups."""

    name: str = field(metadata={"in_file": False})
    groups: Annotated[tuple[str, ...], GROUP]
    """Groups of the replica. Its devices are those of `placement.target_devices` in these groups, or all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """A LoRA adapter of the model. Requests name it as their model. With several models: `[models.NAME.lora.ADAPTER]`.
    `NAME` is yours, as those of groups. See docs/lora.md."""

    name: str = field(metadata={"in_file": False})
    path: Annotated[str, MODEL_PATH]
    """The adapter's GGUF file, as llama.cpp's `convert_lora_to_gguf.py` writes it, or one on the Hugging Face hub.
    Relative to the directory of this file."""
    scale: Annotated[float, Meta(ge=-100, le=100)] = 1.0
    """Factor of what the adapter adds, besides the one in its file. For another one, name the file a second time."""

    @property
    def source(self) -> Path | HubFile:
        return source_of(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Devices and the layers that each of them holds."""

    devices: Annotated[tuple[DeviceRef, ...], DEVICE, Key(name="target_devices")] = ()
    """Devices in layer order; each holds one contiguous range of layers. All indices of a cpu group share one memory,
    so `left:0` and `left:1` are two shards in one process. Empty: all devices of all groups, in the order of this
    file; on several hosts, with an automatic split, the hosts and their order that make a request the fastest."""
    split: Annotated[Split, SPLIT, Key(name="target_layer_split")] = field(default=Auto())
    """Split of the layers over `target_devices`. Weights are shares and need not add up to 1; ranges name
    the layers: `["0-4", "4-8"]` is layers 0 to 3, then 4 to 7. With replicas it is the split of each. `"auto"`: the
    planner chooses, by free memory and the speed of each device, which the first start with a model measures."""
    goal: Goal = "latency"
    """Objective of `target_layer_split = "auto"`: `latency` minimises the time of one request through all devices,
    `throughput` the time of the slowest stage, which limits the throughput of many requests."""

    def split_text(self) -> str:
        """Return the split in the form of `--set placement.target_layer_split=`."""
        written = write_split(self.split)
        return ",".join(str(part) for part in written) if isinstance(written, list) else str(written)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Number formats, context length and concurrency."""

    dtype: DType = "auto"
    """Type of activations and arithmetic, one for the whole pipeline. `auto`: chosen by the planner for the given
    devices. On a cpu, `bfloat16` rounds activations to 8 bits for products of quantised matrices."""
    kv_dtype: KvDType = "auto"
    """Type of the KV cache; `q8_0` quantises it. `auto`: as `dtype`."""
    deterministic: bool = False
    """Bit for bit the same results for a sequence, whatever runs beside it, on which daemons, drafted, preempted,
    restored or rebuilt. Slower; see docs/numerics.md."""
    max_context: Annotated[Annotated[int, Meta(ge=1, le=2**30)] | AutoWord, Key(unit="tokens")] = "auto"
    """Longest sequence, prompt and answer together. `auto`: the model's own limit, or what the pages hold."""
    max_sequences: Annotated[Annotated[int, Meta(ge=1, le=4096)] | AutoWord, Key(unit="sequences")] = "auto"
    """Sequences that run concurrently; others wait in the queue. `auto`: 128 on GPUs, or 64, 32, 16 or 8 where
    more would shorten the context or halve the pages; 8 on a cpu."""
    prefill_chunk: Annotated[Annotated[int, Meta(ge=1, le=2**20)] | AutoWord, Key(unit="tokens")] = "auto"
    """Maximum tokens of a prompt in one step; on a cpu 128 beside other requests. `auto`: 2048 on GPUs with memory for
    it, else 512."""
    pages: Annotated[Annotated[int, Meta(ge=1, le=2**31 - 1)] | AutoWord, Key(unit="pages")] = "auto"
    """Pages of 64 tokens in each pool. On GPUs recurrent states lie in their memory. `auto`: as many as sequences and
    prefix slots can use, and as devices' free memory allows; on a cpu a quarter of the usable memory, or one
    sequence."""

    @property
    def usual_chunk(self) -> int:
        """The prefill chunk; where it is automatic, the one that memory does not matter for."""
        return USUAL_CHUNK if self.prefill_chunk == "auto" else self.prefill_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP endpoint."""

    host: Annotated[str, HOST] = "127.0.0.1"
    """Address to listen on. Any address but loopback needs `api_keys_file` or `allow_open = true`."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    """Port to listen on; 0: any free one, see `lucevisor status`."""
    api_keys_file: Annotated[str, PATH] = ""
    """File of accepted keys, one per line, optionally followed by a name: `KEY NAME`. Empty lines and lines that
    start with `#` are skipped. Empty: no key is required."""
    admin_keys_file: Annotated[str, PATH] = ""
    """Like `api_keys_file`: keys that may also restart groups over HTTP. Empty: nobody may."""
    tls_cert_file: Annotated[str, PATH] = ""
    """Certificate in PEM, followed by its chain: serves HTTPS instead of HTTP. Needs `tls_key_file`."""
    tls_key_file: Annotated[str, PATH] = ""
    """Private key of `tls_cert_file` in PEM, without a password."""
    allow_open: bool = False
    """Serve other machines without an API key."""
    max_queue: Annotated[int, Meta(ge=1, le=2**20), Key(unit="requests")] = 256
    """Requests that may wait in the queue, shared equally by the clients that wait; further ones get 429."""
    max_connections: Annotated[int, Meta(ge=1, le=2**16), Key(unit="connections")] = 1024
    """Open connections; a further one replaces the longest idle one, or gets 503."""
    drain_s: Annotated[float, Meta(ge=0.01, le=86400.0), Key(unit="seconds")] = 2.0
    """Time that a stop waits for running requests; then they end with an error."""
    models_dir: Annotated[str, PATH] = ""
    """Folder of GGUF files, each of which is a model with `preload = false` and its file's name as id, besides those of
    `[models.NAME]`; also those in its direct subfolders. Projectors (`mmproj`) and files that cannot be served
    are left out. Empty: none."""
    cors_origins: Annotated[tuple[str, ...], ORIGIN] = ()
    """Origins whose pages may call the endpoint from a browser. Empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Reuse of computed prompts, in memory and on disk. Except for `normalise` it never changes answers. See
    docs/prefix-cache.md."""

    prefix_slots: Annotated[Annotated[int, Meta(ge=0, le=2**20)] | AutoWord, Key(unit="slots")] = "auto"
    """Prompt prefixes kept in memory; 0 is off. `auto`: 512 on GPUs, 32 on a cpu."""
    memory: Annotated[int | AutoWord, AUTO_SIZE] = "auto"
    """Total memory of prefix slots over all devices: pages that no running request uses, and checkpoints of recurrent
    layers. `auto`: on GPUs half of what they have for pages and states, or all that running requests leave where these
    share memory; 1 GiB on a cpu."""
    states: Literal["device", "host"] = "device"
    """Memory for checkpoints of recurrent layers. `host`: in host memory, and copied when a slot is made or used;
    the devices hold the states of running sequences only. Pages stay on the devices."""
    host: Annotated[int | AutoWord, AUTO_SIZE] = "auto"
    """Host memory for prefix slots that the devices evict, those of preempted requests among them; 0 is off. `auto`:
    half of what is free; off where all devices are cpus, whose slots are in host memory already."""
    dir: Annotated[str, PATH] = ""
    """Directory for snapshots, which survive a restart. Empty: none are written."""
    disk: Annotated[int, SIZE] = 20 * 2**30
    """Total size of snapshots."""
    min_tokens: Annotated[int, Meta(ge=0, le=2**30), Key(unit="tokens")] = 256
    """Shorter prefixes are not cached."""
    checkpoint_pages: Annotated[int, Meta(ge=0, le=2**20), Key(unit="pages")] = 4
    """For models with recurrent layers: a prompt without chat turns is checkpointed at its last multiple of so many
    pages of 64 tokens; 0: at its end only."""
    normalise: Literal["off", "fix", "move"] = "off"
    """Treatment of system prompt lines that some agents change every turn, such as a date or a billing header: `off`
    keeps them; `fix` replaces their values by fixed words, so the model does not see them; `move` moves dates after
    the last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Speculative decoding: cheaply drafted tokens that the model verifies in one step. It never changes answers."""

    kind: Literal["auto", "off", "lookup", "mtp", "dflash", "model"] = "auto"
    """Source of drafts. `lookup` repeats what followed the same tokens before; `mtp` is a multi-token prediction head,
    of the model's own file or of `path`; `dflash` is a drafter trained for this model, in `path`; `model` is any
    smaller model with the same vocabulary and full attention, in `path`. `auto`: the drafter in `path`, else the
    model's own MTP head if it has one, and `lookup` beside it or alone; a drafter that does not fit is left out with a
    notice."""
    path: Annotated[str, HUB_PATH] = ""
    """The drafter's GGUF file, or its safetensors file or directory; required for `dflash` and `model`. Relative to the
    directory of this file."""
    device: Annotated[DeviceRef | None, OPTIONAL_DEVICE] = None
    """Device of the drafter: any device of any group, also of one without layers. Empty: that of the last layers."""
    width: Annotated[Annotated[int, Meta(ge=1, le=64)] | AutoWord, Key(unit="tokens")] = "auto"
    """Maximum number of drafts verified in one step. `auto`: chosen by measured times and acceptance."""

    @property
    def source(self) -> Path | HubFile | None:
        """The drafter's file; None if `path` is empty."""
        return source_of(self.path) if self.path else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFlashConfig:
    """KV Flash: any context in a bounded number of pages on the devices. Beyond them answers change, except with
    policy `exact`, which is slower. See docs/kv-flash.md."""

    pool_tokens: Annotated[Annotated[int, Meta(ge=0, le=2**31 - 1)] | AutoWord, Key(unit="tokens")] = 0
    """Kept per sequence, 512 or more; 0: off; `auto`: up to 16384."""
    policy: Literal["lru", "qk", "drafter", "exact"] = "lru"
    """Selection of the pages that stay. `lru`: the first and the last ones; `qk`: those that queries attend to most;
    `drafter`: those that the scoring model of `[pflash]` finds relevant to the end of a prompt; `exact`: the first and
    the last ones, and all others are read from host memory."""
    host: Annotated[int, SIZE] = 8 * 2**30
    """Host memory of all groups for pages that were paged out, which policy `lru` does not need; taken at start, as
    much as `engine.max_sequences` contexts fill."""
    tau: Annotated[int, Meta(ge=1, le=2**20), Key(unit="tokens")] = 64
    """With `qk`: tokens between two selections of the pages to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PFlashConfig:
    """PFlash: a small scoring model shortens long prompts to their relevant parts before prefill. It changes what the
    model reads. See docs/pflash.md."""

    mode: Literal["off", "auto", "always"] = "off"
    """`auto`: only prompts of at least `threshold` tokens."""
    path: Annotated[str, HUB_PATH] = ""
    """The scoring model's GGUF file, of any family with attention layers, such as Qwen3-0.6B; required unless `mode` is
    off. Relative to the directory of this file."""
    device: Annotated[DeviceRef | None, OPTIONAL_DEVICE] = None
    """Device of the scoring model: any device of any group, also of one without layers. Empty: that of the last
    layers."""
    threshold: Annotated[int, Meta(ge=1, le=2**30), Key(unit="tokens")] = 32000
    """Shortest prompt that `auto` shortens."""
    keep_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.05
    """Share that is kept of what may be shortened."""
    curve: Annotated[tuple[tuple[int, float], ...], CURVE_POINT] = ()
    """The share by the prompt's length, instead of `keep_ratio`: points in ascending order, linear between them and
    constant beyond."""
    window: Annotated[int, Meta(ge=512, le=2**20), Key(unit="tokens")] = 8192
    """Tokens that the scoring model reads at once, at most its context; longer parts take several windows."""

    @property
    def source(self) -> Path | HubFile | None:
        """The scoring model's file; None if `path` is empty."""
        return source_of(self.path) if self.path else None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Images: an encoder reads them, and the model reads what it makes of them. See docs/api.md#images."""

    path: Annotated[str, HUB_PATH] = ""
    """The encoder's GGUF file, which converters name `mmproj`; empty: requests with images are refused. Relative to the
    directory of this file."""
    device: Annotated[DeviceRef | None, OPTIONAL_DEVICE] = None
    """Device of the encoder: any device of any group, also of one without layers. Empty: that of the first layers."""
    min_tokens: Annotated[Annotated[int, Meta(ge=8, le=16384)] | AutoWord, Key(unit="tokens")] = "auto"
    """Smaller images are enlarged to at least that many. `auto`: as the file says. Gemma 4's are always enlarged to
    `max_tokens`."""
    max_tokens: Annotated[Annotated[int, Meta(ge=8, le=16384)] | AutoWord, Key(unit="tokens")] = "auto"
    """Larger images are reduced to at most that many. `auto`: as the file says, or 4096; for Gemma 4 280."""
    media_path: Annotated[str, PATH] = ""
    """Directory of images that requests may name by `file://` URLs. Empty: none; they send images themselves. Relative
    to the directory of this file."""

    @property
    def source(self) -> Path | HubFile | None:
        """The encoder's file; None if `path` is empty."""
        return source_of(self.path) if self.path else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """Recovery from the death of a daemon."""

    hold_s: Annotated[float, Meta(ge=0.0, le=86400.0), Key(unit="seconds")] = 120.0
    """Time that running requests wait for a daemon to come back; 0: they fail immediately."""
    journal: Annotated[int, SIZE] = 2 * 2**30
    """Host memory for boundary activations, from which a lost shard is rebuilt."""
    spares: Annotated[int, Meta(ge=0, le=8), Key(unit="daemons")] = 0
    """Daemons per group kept running without weights, so that a restart only loads the weights."""
    restart_limit: Annotated[RestartLimit, RESTART_LIMIT] = field(default=RestartLimit(10, 60))
    """Maximum restarts of a group in a period; after one more the group is FAILED and tried again after 1 minute, then
    2, 4, up to an hour; `lucevisor restart` tries at once. 0: it stays FAILED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logging to standard error and to a file that outlives the supervisor."""

    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: console on a terminal, JSON otherwise."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""


def source_of(path: str) -> Path | HubFile:
    """Return where a model's file is: a local path, or a file on the hub."""
    return hub_file(path) if path.startswith(HUB_PREFIX) else Path(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A warning at start: a key, its value, why, and what to do."""

    key: str
    value: object
    why: str
    hint: str = ""

    def __str__(self) -> str:
        return format_error(self.key, self.value, self.why, self.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A complete, resolved and valid configuration. Two are equal if they mean the same, wherever they came from."""

    file: Path = field(compare=False)
    model: ModelConfig
    groups: Mapping[str, GroupConfig]
    placement: PlacementConfig
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    cache: CacheConfig = CacheConfig()
    draft: DraftConfig = DraftConfig()
    kvflash: KvFlashConfig = KvFlashConfig()
    pflash: PFlashConfig = PFlashConfig()
    vision: VisionConfig = VisionConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    cluster: ClusterConfig = ClusterConfig()
    log: LogConfig = LogConfig()
    replicas: Mapping[str, ReplicaConfig] = field(default_factory=lambda: MappingProxyType({}))
    lora: Mapping[str, LoraConfig] = field(default_factory=lambda: MappingProxyType({}))
    replica: str = field(default="", compare=False)  # the name of one of them, whose groups these are
    models: Mapping[str, Config] = field(default_factory=lambda: MappingProxyType({}))  # of [models.NAME]
    section: str = field(default="", compare=False)  # "models.NAME", of one of several
    own_keys: frozenset[str] = field(default=frozenset(), compare=False)  # those in that section, as of a lone model
    found: frozenset[str] = field(default=frozenset(), compare=False)  # sections of models of server.models_dir
    neighbours: tuple[Neighbour, ...] = field(default=(), compare=False)  # all models, if there are several
    set_keys: frozenset[str] = field(default=frozenset(), compare=False)
    notices: tuple[Notice, ...] = field(default=(), compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)  # of the command line: `load` takes them again

    def as_dict(self) -> dict[str, object]:
        """Return all keys and values as in the file, JSON-compatible; loading it gives an equal configuration."""
        sections: dict[str, object] = {}
        for name in SECTIONS:
            if not self.models or name not in ("model", *PER_MODEL):
                sections[name] = _written(getattr(self, name))
            if name == "model":
                if self.models:
                    sections[MODELS] = {name: config._as_model() for name, config in self.models.items()}
                sections[GROUPS] = {group.name: _written(group) for group in self.groups.values()}
                if self.replicas:
                    sections[REPLICAS] = {name: _written(replica) for name, replica in self.replicas.items()}
                if self.lora and not self.models:
                    sections[LORA] = self._written_lora()
        return sections

    def _as_model(self) -> dict[str, object]:
        lora: dict[str, object] = {LORA: self._written_lora()} if self.lora else {}
        return {**_written(self.model), **lora, **{name: _written(getattr(self, name)) for name in PER_MODEL}}

    def _written_lora(self) -> dict[str, object]:
        return {name: _written(adapter) for name, adapter in self.lora.items()}

    @property
    def each_model(self) -> Sequence[Config]:
        """The configuration of each model, as if it were the only one."""
        return [*self.models.values()] or [self]

    def without_models(self, names: Collection[str]) -> Config:
        """Return the configuration without some of several models."""
        left = {name: config for name, config in self.models.items() if name not in names}
        return replace(self, models=MappingProxyType(left))

    @property
    def each_replica(self) -> Sequence[Config]:
        """The configuration of each replica, as if its groups were the only ones."""
        return [self._of_replica(replica) for replica in self.replicas.values()] or [self]

    def _of_replica(self, replica: ReplicaConfig) -> Config:
        placement, split = self.placement, self.placement.split
        kept = [index for index, device in enumerate(placement.devices) if device.group in replica.groups]
        if isinstance(split, WeightedSplit) and len(split.values) > len(kept):
            split = WeightedSplit(tuple(split.values[index] for index in kept))
        return replace(
            self,
            groups=MappingProxyType({name: group for name, group in self.groups.items() if name in replica.groups}),
            placement=replace(placement, devices=tuple(placement.devices[index] for index in kept), split=split),
            replicas=MappingProxyType({}),
            replica=replica.name,
        )

    def key(self, key: str) -> str:
        """Return the name in the file of a key that is named as of a lone model."""
        return file_key(key, self.section, self.own_keys)

    @property
    def scores(self) -> bool:
        return self.pflash.mode != "off" or (self.kvflash.policy == "drafter" and self.kvflash.pool_tokens != 0)

    def threads_of(self, group: str, usable_cores: int) -> int:
        """Return the compute threads of a cpu group on a machine where the supervisor may use `usable_cores`; 0: the
        daemon decides.
        """
        config = self.groups[group]
        if config.threads != "auto":
            return config.threads
        if config.host:
            return len(config.cores)  # 0: torch counts those of that host
        groups = {name: other for model in self.neighbours for name, other in model.config.groups.items()}
        n_cpu_groups = sum(other.backend == "cpu" and not other.host for other in {**groups, **self.groups}.values())
        return len(config.cores) or max(1, usable_cores // max(1, n_cpu_groups))


def file_key(key: str, section: str, own_keys: Collection[str]) -> str:
    """Return a key as the file names it, in the ``section`` of one of several models, which has ``own_keys``."""
    name = key.partition("[")[0]  # without the index of an item
    if not section or (name not in own_keys and not name.startswith(("model.", f"{LORA}."))):
        return key
    return f"{section}.{key.removeprefix('model.')}"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One of several models that share devices, and the bytes of its weights."""

    config: Config
    n_bytes: int


GROUPS = "groups"
REPLICAS = "replicas"
LORA = "lora"
MODELS = "models"
PER_MODEL: Final = ("placement", "engine", "cache", "draft", "kvflash", "pflash", "vision")
"""Sections that `[models.NAME]` may contain, as `[models.NAME.engine]`; those of the file itself are for all models."""
SECTIONS: Mapping[str, type[Any]] = {
    "model": ModelConfig,
    "placement": PlacementConfig,
    "engine": EngineConfig,
    "server": ServerConfig,
    "cache": CacheConfig,
    "draft": DraftConfig,
    "kvflash": KvFlashConfig,
    "pflash": PFlashConfig,
    "vision": VisionConfig,
    "recovery": RecoveryConfig,
    "cluster": ClusterConfig,
    "log": LogConfig,
}
"""Sections by their names in the file, in its order; `[groups.NAME]`, one GroupConfig each, comes after model."""


def _written(section: object) -> dict[str, object]:
    return {name: key.write(getattr(section, key.field)) for name, key in keys_of(type(section)).items()}
