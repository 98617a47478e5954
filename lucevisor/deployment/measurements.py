"""Devices, checks and speeds of the groups' interpreters without loading a model, for `plan`, `doctor` and the split.

Speeds and links are measured once by probes, then kept in the user's cache directory.  A start goes on without them
whatever fails here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from lucevisor import __version__, suspend_clock
from lucevisor.config import Config, GroupConfig
from lucevisor.deployment.cache_files import cache_directory, read_json, write_json
from lucevisor.deployment.group_settings import group_devices, group_threads, target_groups
from lucevisor.errors import LucevisorError
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Dtype
from lucevisor.placement.devices import Inventory
from lucevisor.placement.links import ASSUMED, Link, Links
from lucevisor.placement.planner import model_options
from lucevisor.placement.speeds import MeasurementRequest, Speeds, measurement_request
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.loading import ArenaPlan, DeviceInfo
from lucevisor.protocol.messages import TIMED_BYTES, TIMING, Check, CheckLine, Measure, Timing, Tune
from lucevisor.protocol.tcp import TcpPath
from lucevisor.supervision.probe import Probe, probe, probe_launcher


async def inventory(config: Config) -> tuple[dict[str, list[DeviceInfo]], dict[str, str]]:
    """Return the devices of every group that answers, and the problem of each other group."""
    results = await probe_groups(config, None)
    return {g: r.hello.devices for g, r in results.items() if r.hello is not None and not r.problem}, {
        g: r.problem for g, r in results.items() if r.problem
    }


async def probe_groups(config: Config, check: Callable[[str], tuple[Check, list[int]]] | None) -> dict[str, Probe]:
    """Probe all groups at once; ``check(group)``: the Check to run there and its descriptors."""
    with probe_launcher(config) as launcher:

        async def ask(name: str) -> Probe:
            request = check(name) if check is not None else None
            return await probe(config.groups[name], launcher, group_devices(config, name), request, 300.0)

        return dict(zip(config.groups, await asyncio.gather(*map(ask, config.groups)), strict=True))


def check_arena() -> Arena:
    """Create a small arena whose first bytes a checked daemon must see."""
    arena = Arena.create(ArenaPlan(boundary=0, region_bytes=4096, n_regions=1))
    arena.region(0)[:8] = b"lucevisr"
    return arena


async def tune(files: Sequence[Path], config: Config) -> list[CheckLine]:
    """Tune the groups that hold layers, one after the other.  Raises LucevisorError when one fails."""
    lines: list[CheckLine] = []
    with probe_launcher(config) as launcher:
        for group in target_groups(config):
            on_cpu = config.groups[group].backend == "cpu"
            indices = [0] if on_cpu else group_devices(config, group)  # all indices of a cpu group are one device
            request = Tune(indices, group_threads(config, group), model_options(config))
            check = Check([str(f) for f in files], 0, Dtype.BFLOAT16, tune=request)
            answer = await probe(config.groups[group], launcher, indices, (check, []), 600.0)
            if answer.checked is None:
                raise LucevisorError(f"groups.{group} was not tuned: {answer.problem}")
            failed = [line for line in answer.checked.lines if not line.ok]
            if failed:
                raise LucevisorError(f"groups.{group} was not tuned: {failed[0].subject}: {failed[0].detail}")
            lines += [CheckLine(f"{group} {line.subject}", True, line.detail) for line in answer.checked.lines]
    return lines


LINK_S = 15.0
"""Seconds for what times a link; on one that is slower, what has arrived by then says how slow."""
MEASURE_S = 90.0
"""Timeout in seconds for all groups together, less than the 120 s that daemons wait for their load."""

log = structlog.get_logger("lucevisor.deployment")


class SpeedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a file.  ``version`` changes with the layout."""

    version: Literal[2] = 2
    speeds: Speeds


def request_for_split(spec: ModelSpec, config: Config, inventory: Inventory) -> MeasurementRequest | None:
    """Return what to measure for the split of ``config``; None when it does not depend on speeds."""
    threads = {g.name: group_threads(config, g.name) for g in config.groups.values() if g.backend == "cpu"}
    return measurement_request(spec, config, inventory, threads, __version__)


def speed_file(request: MeasurementRequest) -> Path:
    return cache_directory() / f"speeds-{request.conditions.key()}.json"


def read_speeds(request: MeasurementRequest) -> Speeds | None:
    def reject_reason(stored: SpeedFile) -> str:
        if not stored.speeds.valid():
            return "its times are not numbers of 0 or more for each device"
        return "" if stored.speeds.conditions == request.conditions else "it describes other devices or another model"

    stored = read_json(speed_file(request), SpeedFile, "speed file", reject_reason)
    return None if stored is None else stored.speeds


async def speeds_for(
    spec: ModelSpec, files: Sequence[Path], config: Config, inventory: Inventory, *, fresh: bool = False
) -> Speeds | None:
    """Return speeds for the split of ``config``, stored or measured now (always with ``fresh``); None if it needs none,
    or if measuring fails."""
    request = request_for_split(spec, config, inventory)
    if request is None:
        return None
    speeds = None if fresh else read_speeds(request)
    if speeds is not None:
        return speeds
    if not fresh and (reserved := [name for name, group in config.groups.items() if _reserves(config, group)]):
        hint = "`lucevisor plan FILE --measure` while no supervisor runs"
        log.info("speeds not measured", reason=f"the resources of {', '.join(reserved)} are in use", hint=hint)
        return None
    log.info("measuring how fast the devices are", model=spec.name, targets=request.conditions.targets)
    try:
        async with suspend_clock.timeout(MEASURE_S):
            speeds = await measure(request, files, config)
    except TimeoutError:
        log.warning("speeds not measured", reason=f"not done within {MEASURE_S:.0f} s")
        return None
    if speeds is not None:
        write_json(speed_file(request), SpeedFile(speeds=speeds), "speeds")
    return speeds


def _reserves(config: Config, group: GroupConfig) -> bool:
    """Return whether Ray reserves resources for the group's daemon, so that a probe beside it might wait for ever."""
    return config.cluster.launcher == "ray" and "=" in group.host


async def measure(request: MeasurementRequest, files: Sequence[Path], config: Config) -> Speeds | None:
    """Let a probe of each group time its spans, one group at a time."""
    devices = config.placement.devices
    timings: list[list[Timing]] = [[] for _ in devices]
    with probe_launcher(config) as launcher:
        for group in dict.fromkeys(device.group for device in devices):
            targets = [i for i, device in enumerate(devices) if device.group == group]
            check = _check(request, targets, files, config, group)
            assert check.measure is not None
            indices = sorted({span.device for span in check.measure.spans})
            answer = await probe(config.groups[group], launcher, indices, (check, []), MEASURE_S)
            timings_ = answer.checked.timings if answer.checked is not None else []
            if len(timings_) != len(check.measure.spans):
                log.warning("speeds not measured", group=group, reason=_failure(answer))
                return None
            remaining = iter(timings_)
            for i in targets:
                timings[i] = [next(remaining) for _ in request.spans[i]]
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    speeds = request.to_speeds(timings, now)
    if not speeds.valid():
        log.warning("speeds not measured", reason="a device reported impossible times")
        return None
    return speeds


# ---- links


class LinkFile(msgspec.Struct, frozen=True, kw_only=True):
    """The links measured so far, by the supervisor's address and the host.  ``version`` changes with the layout."""

    version: Literal[1] = 1
    links: dict[str, Link]


def link_file() -> Path:
    return cache_directory() / "links.json"


def remote_groups(config: Config) -> dict[str, str]:
    groups: dict[str, str] = {}
    for name, group in config.groups.items():
        if group.host:
            groups.setdefault(group.host_name, name)
    return groups


def read_links(config: Config) -> Links:
    if not (hosts := remote_groups(config)):
        return Links()

    stored = _read_link_file()
    return Links({host: stored[key] for host in hosts if (key := _link_key(config, host)) in stored})


async def links_for(
    config: Config, time_way: Callable[[str], Awaitable[TcpPath | None]], *, fresh: bool = False
) -> Links:
    """Return the links to the hosts of ``config``, stored or measured now (always with ``fresh``) by ``time_way``.

    A link that cannot be measured is missing.
    """
    known = {} if fresh else dict(read_links(config).of_host)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    for host, group in remote_groups(config).items():
        way = None if host in known else await time_way(group)
        if way is not None:
            known[host] = Link(way.least_round_trip_s, way.bytes_per_s or ASSUMED.bytes_per_s, now)
            log.info("measured the link to a host", host=host, link=str(known[host]))
    if any(link.measured == now for link in known.values()):
        links = _read_link_file() | {_link_key(config, host): link for host, link in known.items()}
        write_json(link_file(), LinkFile(links=links), "links")
    return Links(known)


def _read_link_file() -> dict[str, Link]:
    def reject_reason(stored: LinkFile) -> str:
        return "" if all(link.valid() for link in stored.links.values()) else "its numbers are not those of links"

    stored = read_json(link_file(), LinkFile, "link file", reject_reason)
    return {} if stored is None else stored.links


async def measure_links(config: Config) -> Links:
    """Measure the links to all hosts with a probe of one group on each."""
    if not remote_groups(config):
        return Links()
    with probe_launcher(config) as launcher:

        async def time_way(group: str) -> TcpPath | None:
            devices = group_devices(config, group)
            payload = [bytes(TIMED_BYTES)]
            answer = await probe(config.groups[group], launcher, devices, (TIMING, []), LINK_S, payload)
            return answer.way

        return await links_for(config, time_way, fresh=True)


def _link_key(config: Config, host: str) -> str:
    return f"{config.cluster.listen} {host}"


def _failure(answer: Probe) -> str:
    lines = answer.checked.lines if answer.checked is not None else []
    return answer.problem or "; ".join(f"{x.subject}: {x.detail}" for x in lines) or "the probe returned too few times"


def _check(
    request: MeasurementRequest, targets: Sequence[int], files: Sequence[Path], config: Config, group: str
) -> Check:
    spans = [span for i in targets for span in request.spans[i].values()]
    conditions = request.conditions
    timing = Measure(spans, conditions.kv_dtype, conditions.n_rows, group_threads(config, group), model_options(config))
    return Check([str(f) for f in files], 0, conditions.dtype, [], timing)
