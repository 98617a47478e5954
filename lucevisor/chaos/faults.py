"""The faults of `lucevisor chaos`. When a fault's function returns, the processes it stopped run again or were
replaced, and the limits it set are lifted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from lucevisor.errors import LucevisorError, NotRunningError
from lucevisor.protocol import fault_hooks

READY_S: Final = 600.0
"""Seconds that a fault may keep the endpoint from being ready."""
HEARTBEAT_S: Final = 3.0
"""After this long without a heartbeat a daemon is replaced, while faults are injected."""
FOREVER_S: Final = 100_000.0
_POLL_S: Final = 0.02


Order = Callable[[str, str, dict[str, Any] | None], Awaitable[dict[str, Any]]]
"""Calls the admin socket of the serving supervisor.  Arguments: method, path, body."""


@dataclass(slots=True)
class Target:
    """The supervisor that faults are injected into.  ``pids``: of all supervisors, of which the last one serves.
    ``take_over`` starts another one in its place; it returns when that serves and the other has ended, or has failed.
    """

    pids: list[int]
    hooks: Path
    cache: Path
    order: Order
    take_over: Callable[[], Awaitable[None]]

    @property
    def pid(self) -> int:
        return self.pids[-1]

    async def status(self) -> dict[str, Any]:
        """Return the supervisor's status; at a take-over nothing listens for a moment."""
        end_s = time.monotonic() + READY_S
        while True:
            try:
                return await self.order("GET", "/status", None)
            except NotRunningError:
                if time.monotonic() > end_s:
                    raise
                await asyncio.sleep(_POLL_S)

    async def daemons(self) -> dict[str, int]:
        """Return the pids of the daemons that run, by group."""
        return {group["name"]: group["pid"] for group in (await self.status())["groups"] if group["pid"]}

    async def ready(self, replaced: int = 0, repeat: Callable[[], None] = lambda: None) -> None:
        """Wait until daemon ``replaced`` is gone, all are ready and a step that began since then has finished, so there
        must be traffic. Meanwhile call ``repeat``, in case another fault undid the injection. Raises LucevisorError
        after READY_S."""
        end_s = time.monotonic() + READY_S
        ready_at: int | None = None  # steps of the last stage when all were ready
        while True:
            status = await self.status()
            gone = replaced not in [group["pid"] for group in status["groups"]]
            if not gone:
                repeat()
            n_steps = [stage["steps"] for stage in status["engine"]["stages"]]  # none while a successor takes over
            if status["state"] != "ready" or not gone or status["engine"]["held"] or not n_steps:
                ready_at = None  # another fault came meanwhile
            else:
                ready_at = n_steps[-1] if ready_at is None else ready_at
                if n_steps[-1] > ready_at + 2 * len(n_steps):  # more than were on their way: two a stage
                    return
            if time.monotonic() > end_s:
                what = (
                    f"{status['state']}: {status['reason']}" if ready_at is None else "it is ready, and makes no steps"
                )
                raise LucevisorError(f"not served again after {READY_S:.0f} s: {what}")
            await asyncio.sleep(_POLL_S)

    def processes(self) -> list[psutil.Process]:
        """Return the supervisors and all processes below them."""
        processes: list[psutil.Process] = []
        for pid in self.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                supervisor = psutil.Process(pid)
                processes += [supervisor, *supervisor.children(recursive=True)]
        return processes


Fault = Callable[[Target, random.Random], Coroutine[None, None, None]]


async def _any_daemon(target: Target, rng: random.Random) -> int:
    daemons = await target.daemons()
    if not daemons:
        await target.ready()
        daemons = await target.daemons()
    return rng.choice(list(daemons.values()))


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).send_signal(number)


async def kill(target: Target, rng: random.Random) -> None:
    """SIGKILL to a daemon."""
    pid = await _any_daemon(target, rng)
    _signal(pid, signal.SIGKILL)
    await target.ready(pid)


async def terminate(target: Target, rng: random.Random) -> None:
    """SIGTERM to a daemon, which ends after its step."""
    pid = await _any_daemon(target, rng)
    _signal(pid, signal.SIGTERM)
    await target.ready(pid)


async def save(target: Target, rng: random.Random) -> None:
    """SIGKILL to a daemon that writes a snapshot."""
    await _kill_with(target, rng, ".partial")


async def restore(target: Target, rng: random.Random) -> None:
    """SIGKILL to a daemon that reads a snapshot."""
    await _kill_with(target, rng, ".safetensors")


async def _kill_with(target: Target, rng: random.Random, ending: str) -> None:
    """SIGKILL to a daemon at the moment it has a file with such a name open."""
    end_s = time.monotonic() + 10.0
    pids = list((await target.daemons()).values())
    while time.monotonic() < end_s:
        for pid in pids:
            if any(name.endswith(ending) for name in _open_files(pid)):
                _signal(pid, signal.SIGKILL)
                await target.ready(pid)
                return
        await asyncio.sleep(0.001)  # a file of the demo is open for some milliseconds
    await kill(target, rng)


def _open_files(pid: int) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        return [os.readlink(entry.path) for entry in entries]
    return []


async def restart(target: Target, rng: random.Random) -> None:
    """An operator's restart of a group, and SIGKILL to a daemon while it lasts."""
    name = rng.choice([group["name"] for group in (await target.status())["groups"]])
    await _kill_during(target, rng, target.order("POST", "/restart", {"groups": [name]}))


async def reload(target: Target, rng: random.Random) -> None:
    """A reload that moves layers between devices, and SIGKILL to a daemon while it lasts."""
    n_devices = sum(len(group["devices"]) for group in (await target.status())["groups"])
    shares = ",".join(str(rng.randint(1, 3)) for _ in range(n_devices))
    overrides = [f"placement.target_layer_split={shares}"]
    await _kill_during(target, rng, target.order("POST", "/reload", {"set": overrides}))


async def take_over(target: Target, rng: random.Random) -> None:
    """Another supervisor takes over, and SIGKILL to a daemon of either while it lasts."""
    await _kill_during(target, rng, target.take_over())


async def _kill_during(target: Target, rng: random.Random, operation: Awaitable[object]) -> None:
    done = asyncio.ensure_future(operation)
    await asyncio.sleep(rng.uniform(0.0, 3.0))
    daemons = [process.pid for process in target.processes() if _runs_daemon(process)]
    if daemons:
        _signal(rng.choice(daemons), signal.SIGKILL)
    with contextlib.suppress(LucevisorError):  # refused or undone, as a daemon was lost
        await done
    await target.ready()


def _runs_daemon(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "daemons" in process.cmdline()
    return False


async def stop(target: Target, rng: random.Random) -> None:
    """SIGSTOP to a daemon, until it is replaced."""
    pid = await _any_daemon(target, rng)
    _signal(pid, signal.SIGSTOP)
    await target.ready(pid, lambda: _signal(pid, signal.SIGSTOP))


async def hang(target: Target, rng: random.Random) -> None:
    """A daemon whose interpreter lock is never given back."""
    pid = await _any_daemon(target, rng)
    with contextlib.suppress(OSError):  # it may just have been replaced
        fault_hooks.inject(target.hooks, pid, "hang", FOREVER_S)
        await target.ready(pid)


async def slow(target: Target, rng: random.Random) -> None:
    """A daemon that runs a fifth of the time, for three seconds."""
    pid = await _any_daemon(target, rng)
    for _ in range(15):
        _signal(pid, signal.SIGSTOP)
        await asyncio.sleep(0.16)
        _signal(pid, signal.SIGCONT)
        await asyncio.sleep(0.04)


async def memory(target: Target, rng: random.Random) -> None:
    """A daemon that gets no more memory from the system, for up to four seconds."""
    pid = await _any_daemon(target, rng)
    with _limited([pid], resource.RLIMIT_AS):
        await asyncio.sleep(rng.uniform(1.0, 4.0))
    await target.ready()


async def disk(target: Target, rng: random.Random) -> None:
    """No process can write another byte to any file for up to four seconds, as with a full disk."""
    with _limited([process.pid for process in target.processes()], resource.RLIMIT_FSIZE):
        await asyncio.sleep(rng.uniform(1.0, 4.0))
    await target.ready()


@contextlib.contextmanager
def _limited(pids: list[int], limit: int) -> Iterator[None]:
    """Set the soft limit of processes, and of those they start meanwhile, to 0; afterwards to the hard one again."""
    before: dict[psutil.Process, tuple[int, int]] = {}
    try:
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                before[process] = process.rlimit(limit)
                process.rlimit(limit, (0, before[process][1]))
        yield
    finally:
        children: dict[psutil.Process, tuple[int, int]] = {}
        for process, limits in before.items():
            with contextlib.suppress(psutil.Error):
                process.rlimit(limit, limits)
                children |= {child: limits for child in process.children(recursive=True) if child not in before}
        for process, limits in children.items():
            with contextlib.suppress(psutil.Error):
                process.rlimit(limit, limits)


async def snapshot(target: Target, rng: random.Random) -> None:
    """A flipped byte in up to four snapshots, and a daemon killed, so that prefixes come from files."""
    files = sorted(target.cache.glob("*.safetensors"))
    for file in rng.sample(files, min(4, len(files))):
        with contextlib.suppress(OSError), file.open("r+b") as writer:
            at = rng.randrange(file.stat().st_size)
            writer.seek(at)
            byte = writer.read(1)[0]
            writer.seek(at)
            writer.write(bytes([byte ^ 1 << rng.randrange(8)]))
    await kill(target, rng)


async def heartbeat(target: Target, rng: random.Random) -> None:
    """A daemon that computes and sends no heartbeats, for too long or not quite."""
    pid = await _any_daemon(target, rng)
    with contextlib.suppress(OSError):
        if rng.random() < 0.5:
            fault_hooks.inject(target.hooks, pid, "mute", FOREVER_S)
            await target.ready(pid)
        else:
            fault_hooks.inject(target.hooks, pid, "mute", HEARTBEAT_S / 2)
            await asyncio.sleep(HEARTBEAT_S / 2)


async def clock(target: Target, rng: random.Random) -> None:
    """The wall clocks of all processes jump by up to a week, each by its own amount."""
    for pid in (target.pid, *(await target.daemons()).values()):
        with contextlib.suppress(OSError):
            fault_hooks.inject(target.hooks, pid, "clock", rng.uniform(-1.0, 1.0) * 7 * 86_400)
    await asyncio.sleep(1.0)


async def paused(target: Target, rng: random.Random) -> None:
    """SIGSTOP to the supervisor, for longer than a daemon may be silent or not."""
    pid = target.pid  # another supervisor may take over meanwhile
    _signal(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(rng.uniform(0.2, 2 * HEARTBEAT_S))
    finally:
        _signal(pid, signal.SIGCONT)
    await target.ready()


FAULTS: Mapping[str, Fault] = {
    "kill": kill,
    "terminate": terminate,
    "stop": stop,
    "hang": hang,
    "slow": slow,
    "memory exhausted": memory,
    "disk full": disk,
    "snapshots damaged": snapshot,
    "killed while saving": save,
    "killed while restoring": restore,
    "restart": restart,
    "reload": reload,
    "take-over": take_over,
    "heartbeat dropped": heartbeat,
    "clock jumps": clock,
    "supervisor paused": paused,
}
