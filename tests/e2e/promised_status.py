"""What scripts rely on in the JSON of `lucevisor status --json` and `GET /status`; there may be more, never less."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Model(msgspec.Struct):
    name: str
    architecture: str
    layers: int
    quant: str


class Device(msgspec.Struct):
    device: str
    layers: tuple[int, int]
    weight_bytes: int
    state_bytes: int
    free_bytes: int


class Group(msgspec.Struct):
    name: str
    backend: Literal["cpu", "cuda", "hip"]
    host: str
    pid: int | None
    daemon_pid: int | None
    state: str
    restarts: int
    stages: list[int]
    devices: list[Device]
    warnings: list[str]
    spare: bool


class Pages(msgspec.Struct):
    total: int
    used: int
    host: int


class Engine(msgspec.Struct):
    running: int
    queued: int
    held: int
    tokens_per_s: float
    pages: Pages


class HostUse(msgspec.Struct):
    owner: str
    bytes: int
    limit_bytes: int | None
    key: str


class OneModel(msgspec.Struct):
    name: str
    state: str
    reason: str
    model: Model
    engine: Engine


class Status(msgspec.Struct):
    name: str
    pid: int
    url: str
    state: Literal["ready", "starting", "degraded", "failed", "draining"]
    model: Model
    groups: list[Group]
    engine: Engine
    draft: dict[str, Any]
    host_memory: list[HostUse]
    cache: dict[str, Any]
    models: list[OneModel]
