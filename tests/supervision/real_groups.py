"""Groups of real processes for tests: the tiny daemon behind the real main, link, heartbeat and supervisor."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import asynccontextmanager
from pathlib import Path

import lucevisor
from lucevisor.config import GroupConfig
from lucevisor.model.values import Dtype, LayerRange
from lucevisor.protocol.handshake import source_hash
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.supervision.child import StagedPackages, stage_packages
from lucevisor.supervision.daemon import Callbacks, LoadWithFiles
from lucevisor.supervision.events import State
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.launcher import Launcher
from lucevisor.supervision.machine import SupervisionLimits
from tests.waiting import until

FAST = SupervisionLimits(backoff_min_s=0.05, hello_s=60.0, exit_grace_s=0.5, stacks_s=0.5, recheck_s=0.1, n_restarts=3)
REAL = ("__init__.py", "__main__.py", "compute_lock.py", "errors.py", "main.py", "options.py", "heartbeat.py")


def brisk(**changes) -> SupervisionLimits:
    """The limits of the tests with some changed."""
    return SupervisionLimits(**{name: getattr(FAST, name) for name in SupervisionLimits.__slots__} | changes)


def stage_tiny(run_dir: Path) -> StagedPackages:
    """Stage the packages as the supervisor does, with the tiny run_worker() in place of the one that needs torch."""
    staging = stage_packages(run_dir).directory
    real = (staging / "daemons").resolve()
    (staging / "daemons").unlink()
    (staging / "daemons").mkdir()
    for name in REAL:
        (staging / "daemons" / name).symlink_to(real / name)
    (staging / "daemons" / "worker.py").symlink_to(Path(__file__).parent / "tiny" / "worker.py")
    return StagedPackages(staging, source_hash(Path(lucevisor.__file__).parent, staging / "daemons"))


def tiny_load() -> LoadWithFiles:
    """An order that no tiny daemon looks at."""
    stage = StagePlan(0, [ShardPlan(0, LayerRange(0, 1))], None, None, embedding=True, output=True)
    return LoadWithFiles(Load([], Dtype.FLOAT32, Dtype.FLOAT32, [stage], [], PoolSizes(1, 0, 0), 1, 1))


class Owner:
    """The owner of a group: writes down what it is told, in order."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.news: list[str] = []
        self.links = []
        self.frames = []
        self.progress = []
        self.lost: list[str] = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.asked_for_load = asyncio.Event()
        self.load_error: Exception | None = None
        self.n_cancelled_loads = 0
        self.hellos = []

    def callbacks(self, on_draining=None) -> Callbacks:
        return Callbacks(
            make_load=self.make_load,
            on_ready=self.on_ready,
            on_lost=self.on_lost,
            on_frame=lambda _, frame: self.frames.append(frame),
            on_state=self.on_state,
            on_draining=on_draining,
            on_progress=lambda _, progress: self.progress.append(progress),
        )

    async def make_load(self, group, hello) -> LoadWithFiles:
        self.hellos.append(hello)
        self.asked_for_load.set()
        try:
            await self.may_load.wait()
        except asyncio.CancelledError:
            self.n_cancelled_loads += 1
            raise
        if self.load_error is not None:
            raise self.load_error
        return tiny_load()

    def on_ready(self, group, link, hello, loaded) -> None:
        self.news.append("ready")
        self.links.append(link)

    def on_lost(self, group, reason) -> None:
        self.news.append("lost")
        self.lost.append(reason)

    def on_state(self, group, state, reason) -> None:
        self.states.append(state)


@asynccontextmanager
async def tiny_group(
    run_dir, how="", *, limits=FAST, owner=None, launcher=Launcher, name="left", draining=None, n_spares=0, **env
):
    """A stopped group whose daemon behaves as `how` says; killed at the end, whatever the test did."""
    owner = owner or Owner()
    staging = run_dir if isinstance(run_dir, StagedPackages) else stage_tiny(run_dir)
    config = GroupConfig(name=name, backend="cpu", env={"TINY": how, **env})
    group = GroupSupervisor(config, 1, launcher(staging), [owner.callbacks(draining)], limits=limits, n_spares=n_spares)
    try:
        yield group, owner
    finally:
        if not group.quarantined:
            await group.stop(deadline_s=0.0)


@asynccontextmanager
async def ready_group(run_dir, how="", **more):
    """A group that is READY; else as `tiny_group`."""
    async with tiny_group(run_dir, how, **more) as (group, owner):
        await group.start()
        await ready(group)
        yield group, owner


async def ready(group: GroupSupervisor, n_restarts: int | None = None) -> None:
    """Wait until the group is READY, after `n_restarts` restarts if given."""
    await until(
        lambda: group.state is State.FAILED or (group.state is State.READY and n_restarts in (None, group.restarts))
    )
    assert group.state is State.READY, group.reason


def links_of(pid: int) -> list[str]:
    """What the open descriptors of a process are, by name."""
    return [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def exists(pid: int) -> bool:
    """Whether a process is there, a zombie included."""
    return Path(f"/proc/{pid}").exists()


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_descriptors() -> int:
    """Descriptors in use, without those that garbage of other tests still holds."""
    return len(_descriptors())


def _descriptors() -> set[int]:
    gc.collect()
    found = set(map(int, os.listdir("/proc/self/fd")))
    return {number for number in found if Path(f"/proc/self/fd/{number}").is_symlink()}  # not that of the listing


def zombies() -> int:
    """Children of this process that nobody has waited for."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            count += fields[0] == "Z" and fields[1] == str(os.getpid())
    return count
