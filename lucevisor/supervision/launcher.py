"""How a group's daemon comes to run, and the two channels to it.

A :class:`Launcher` is all that supervision knows of where daemons run: `LocalLauncher` makes child processes of this
host and speaks over socketpairs. Knows no states and no messages. Invariant: a launched process reports its exit once,
after its last line of output.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Protocol

from lucevisor.config import GroupConfig
from lucevisor.errors import LucevisorError
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.transport import Link
from lucevisor.supervision.child import Child, Ended, SpawnError, find_python, spawn
from lucevisor.supervision.environment import launch
from lucevisor.supervision.events import ProcessSignal
from lucevisor.supervision.output import Lines
from lucevisor.supervision.staging import StagedPackages

OnFrame = Callable[[Frame], None]
OnClosed = Callable[[ProtocolError], None]


class DaemonProcess(Protocol):
    """A launched daemon. Each channel is opened once, right after the launch; whoever opens it closes it."""

    @property
    def pid(self) -> int:
        """Its process id, for logs and `status`."""

    @property
    def lines(self) -> Mapping[str, Lines]:
        """Its last output, by stream."""

    def open_link(self, name: str, on_frame: OnFrame, on_closed: OnClosed) -> Link:
        """The channel of steps and results."""

    def open_pulse(self, name: str, on_frame: OnFrame, on_closed: OnClosed) -> Link:
        """The channel of heartbeats, load progress and logs."""

    def send(self, to_send: ProcessSignal) -> None:
        """Signal the process. Raises ProcessLookupError when it is gone."""


class Launcher(Protocol):
    """Starts daemons that run the supervisor's own sources."""

    @property
    def source_hash(self) -> str:
        """What a daemon must report in its hello."""

    def launch(
        self,
        config: GroupConfig,
        threads: int,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[Ended], None],
    ) -> DaemonProcess:
        """Start the group's daemon; `threads` is 0 for the library's choice. Raises SpawnError."""


class LocalLauncher:
    """Child processes of this one; use it in the main thread."""

    def __init__(self, staging: StagedPackages) -> None:
        self.source_hash = staging.source_hash
        self._staging = staging

    def launch(
        self,
        config: GroupConfig,
        threads: int,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[Ended], None],
    ) -> Child:
        """Look up the group's interpreter and spawn it. Raises SpawnError."""
        env = {**os.environ, **config.environment()}
        python = find_python(config.python, env.get("PATH"))
        try:
            self._staging.renew()
        except LucevisorError as error:
            raise SpawnError(str(error), configuration=True) from error
        directory = self._staging.directory
        return spawn(lambda handles: launch(config, threads, directory, os.environ, python, handles), on_line, on_exit)
