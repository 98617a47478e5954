"""Progress of a start: one bar per shard on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from lucevisor.app import logs
from lucevisor.config import Config
from lucevisor.supervision.states import State

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from lucevisor.deployment.service import Service
    from lucevisor.protocol.messages import Progress


class StartDisplay:
    """An observer of the service: shows loading, then the address, then gets out of the way."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._bars: Bars | None = None
        self._tasks: dict[tuple[str, int, int], TaskID] = {}
        self._tenths: dict[tuple[str, int, int], int] = {}
        self._announced = False

    def __enter__(self) -> StartDisplay:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_bars()

    def state(self, group: str, state: State, reason: str) -> None:
        """Called when a group changes its state, which is also logged."""

    def progress(self, group: str, progress: Progress) -> None:
        """Called when a shard has loaded more bytes."""
        key = (group, progress.stage, progress.device)
        title = f"{group}:{progress.device} {progress.phase}"
        if self._bars is not None:
            task = self._tasks.get(key)
            if task is None:
                task = self._tasks[key] = self._bars.add_task(title, total=progress.total_bytes)
            self._bars.update(task, completed=progress.done_bytes, total=progress.total_bytes, description=title)
            return
        tenths = 10 * progress.done_bytes // max(1, progress.total_bytes)
        if tenths > self._tenths.get(key, -1):
            self._tenths[key] = tenths
            logs.print_line(f"loading {title} {10 * tenths}% of {progress.total_bytes} bytes")

    def ready(self, service: Service) -> None:
        """Called when the endpoint is ready."""
        self._end_bars()
        self._tasks.clear()
        self._tenths.clear()
        if not self._announced and service.placement is not None:
            self._announced = True
            devices = ", ".join(f"{d.device} layers {d.layers}" for d in service.placement.devices)
            logs.print_line(f"ready: {service.model.name} ({service.model.spec.quant}) over {devices}")

    def _end_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


class SilentDisplay:
    """An observer that does nothing."""

    def state(self, group: str, state: State, reason: str) -> None:
        """Do nothing."""

    def progress(self, group: str, progress: Progress) -> None:
        """Do nothing."""

    def ready(self, service: Service) -> None:
        """Do nothing."""
