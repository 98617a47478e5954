"""How fast the devices run the model's layers: measured once by probes, kept in the user's cache directory.

One JSON file for each model, set of devices and pair of formats, written whole or not at all.  Invariant: a file that
cannot be read, is of another version or does not match what is asked counts as not there, with a line in the log; and
nothing that goes wrong here keeps a start from going on without speeds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from lucevisor import __version__, awake
from lucevisor.config import Config
from lucevisor.deployment.group_settings import group_threads
from lucevisor.model.spec import ModelSpec
from lucevisor.placement.devices import Inventory
from lucevisor.placement.planner import model_options
from lucevisor.placement.speeds import Clock, Request, Speeds, request_of
from lucevisor.protocol.checks import Check, Measure, Timing
from lucevisor.supervision.launcher import LocalLauncher
from lucevisor.supervision.probe import Probe, probe
from lucevisor.supervision.staging import stage_packages

HELLO_S = 60.0
MEASURE_S = 90.0
"""For all groups together: the daemons that wait to be told what to load are given up after 120 s."""

log = structlog.get_logger("speeds")


class SpeedFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds.  Another layout gets another ``version``."""

    version: Literal[1] = 1
    speeds: Speeds


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/lucevisor``; a relative value counts as not set."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "lucevisor"


def wanted(spec: ModelSpec, config: Config, inventory: Inventory) -> Request | None:
    """What must be known for the split of ``config``; None when its ranges do not depend on speeds."""
    threads = {g.name: group_threads(config, g.name) for g in config.groups.values() if g.backend == "cpu"}
    return request_of(spec, config, inventory, threads, __version__)


def path_of(request: Request) -> Path:
    """Where the answer to a request is kept."""
    return cache_directory() / f"speeds-{request.conditions.key()}.json"


def read(request: Request, spec: ModelSpec) -> Speeds | None:
    """What was measured earlier for the same request; None when nothing usable is there."""
    path = path_of(request)
    try:
        speeds = msgspec.json.decode(path.read_bytes(), type=SpeedFile).speeds
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        log.warning("speed file ignored", file=str(path), reason=str(error))
        return None
    reason = "" if speeds.conditions == request.conditions else "it is about other devices or another model"
    if not speeds.valid():
        reason = "its times are not numbers of 0 or more for each device"
    try:
        Clock.of(spec, speeds)
    except KeyError as error:
        reason = str(error.args[0])
    if reason:
        log.warning("speed file ignored", file=str(path), reason=reason)
        return None
    return speeds


def write(request: Request, speeds: Speeds) -> None:
    """Keep what was measured; a directory that cannot be written is a line in the log."""
    path = path_of(request)
    data = msgspec.json.format(msgspec.json.encode(SpeedFile(speeds=speeds)), indent=1) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".speeds-", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        log.warning("speeds not kept", file=str(path), reason=str(error))


async def speeds_for(
    spec: ModelSpec, files: Sequence[Path], config: Config, inventory: Inventory, *, fresh: bool = False
) -> Speeds | None:
    """Speeds for the split of ``config``: kept ones, else (or with ``fresh``) measured now.

    None where the split does not depend on them, and where measuring fails: that is logged.
    """
    request = wanted(spec, config, inventory)
    if request is None:
        return None
    found = None if fresh else read(request, spec)
    if found is not None:
        return found
    log.info("measuring how fast the devices are", model=spec.name, seats=request.conditions.seats)
    try:
        async with awake.timeout(MEASURE_S):
            found = await measure(request, files, config)
    except TimeoutError:
        log.warning("speeds not measured", reason=f"not done within {MEASURE_S:.0f} s")
        return None
    if found is not None:
        write(request, found)
    return found


async def measure(request: Request, files: Sequence[Path], config: Config) -> Speeds | None:
    """Have a probe of each group time its spans, one group after another so that none disturbs another."""
    devices = config.placement.devices
    timings: list[list[Timing]] = [[] for _ in devices]
    with tempfile.TemporaryDirectory(prefix="lucevisor-speeds-") as directory:
        launcher = LocalLauncher(stage_packages(Path(directory)))
        for group in dict.fromkeys(device.group for device in devices):
            seats = [i for i, device in enumerate(devices) if device.group == group]
            check = _check(request, seats, files, config, group)
            assert check.measure is not None
            indices = sorted({span.device for span in check.measure.spans})
            answer = await probe(config.groups[group], launcher, indices, (check, []), HELLO_S, MEASURE_S)
            found = answer.checked.timings if answer.checked is not None else []
            if len(found) != len(check.measure.spans):
                log.warning("speeds not measured", group=group, reason=_why(answer))
                return None
            rest = iter(found)
            for i in seats:
                timings[i] = [next(rest) for _ in request.spans[i]]
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    speeds = request.answered(timings, now)
    if not speeds.valid():
        log.warning("speeds not measured", reason="a clock gave times that cannot be")
        return None
    return speeds


def _why(answer: Probe) -> str:
    lines = answer.checked.lines if answer.checked is not None else []
    return answer.problem or "; ".join(f"{x.subject}: {x.detail}" for x in lines) or "the probe gave too few times"


def _check(request: Request, seats: Sequence[int], files: Sequence[Path], config: Config, group: str) -> Check:
    spans = [span for i in seats for span in request.spans[i].values()]
    conditions = request.conditions
    order = Measure(spans, conditions.kv_dtype, conditions.n_rows, group_threads(config, group), model_options(config))
    return Check([str(f) for f in files], 0, conditions.dtype, [], order)
