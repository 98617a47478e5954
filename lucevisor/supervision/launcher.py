"""Launches daemons as child processes of this host.

Invariant: a launched process reports its exit once, after its last line of output.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lucevisor
from lucevisor.config import GroupConfig
from lucevisor.errors import LucevisorError
from lucevisor.protocol.handshake import SHARED_PACKAGES, source_hash
from lucevisor.source_tree import locate
from lucevisor.supervision.child import Child, ProcessEnd, SpawnError, daemon_command, environment, find_python, spawn

_NAME = "staging"
_DAEMONS = "daemons"


@dataclass(frozen=True, slots=True)
class StagedPackages:
    """The PYTHONPATH of every daemon, and the hash of the sources it held when the supervisor started.

    A package that is replaced while the supervisor runs makes the next daemon's hello differ from `source_hash`.
    """

    directory: Path
    source_hash: str

    def renew(self) -> None:
        """Make the directory again if it was removed, as systemd does with /run/user/UID at the last logout.

        Raises LucevisorError when that cannot be done.
        """
        if (self.directory / _DAEMONS).is_dir():
            return
        try:
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stage_packages(self.directory.parent)
        except OSError as error:
            raise LucevisorError(
                f"{self.directory.parent} was removed and cannot be made again: {error.strerror}; keep the run "
                "directory (`loginctl enable-linger` for /run/user), or set XDG_RUNTIME_DIR"
            ) from error


def stage_packages(run_dir: Path) -> StagedPackages:
    """Create `run_dir/staging`, replacing that of an earlier run.

    Raises LucevisorError naming the path when `run_dir` belongs to another user, or when the `daemons` package is not
    there.
    """
    package = Path(lucevisor.__file__).resolve().parent
    daemons = locate("daemons")
    if not (daemons / "__main__.py").is_file():
        raise LucevisorError(f"{daemons}: the daemons' code is missing; install lucevisor again")
    status = os.lstat(run_dir)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise LucevisorError(f"{run_dir} is not a directory of user {os.geteuid()}; remove it or set XDG_RUNTIME_DIR")
    staging = run_dir / _NAME
    if staging.is_symlink() or staging.is_file():
        staging.unlink()
    elif staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(mode=0o700)
    (staging / "lucevisor").mkdir(mode=0o700)
    (staging / _DAEMONS).symlink_to(daemons)
    (staging / "lucevisor" / "__init__.py").symlink_to(package / "__init__.py")
    for name in SHARED_PACKAGES:
        (staging / "lucevisor" / name).symlink_to(package / name)
    return StagedPackages(staging, source_hash(package, daemons))


class LocalLauncher:
    """Starts daemons that run the supervisor's own sources; use it in the main thread.

    `source_hash`: what a daemon must report in its hello. `rows_host`: where daemons listen for rows of neighbours, if
    some share no memory.
    """

    def __init__(self, staging: StagedPackages, rows_host: str = "") -> None:
        self.source_hash = staging.source_hash
        self._staging, self._rows_host = staging, rows_host

    def launch(
        self,
        config: GroupConfig,
        threads: int,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[ProcessEnd], None],
        n_links: int = 1,
    ) -> Child:
        """Look up the group's interpreter and spawn it, with a link for each model. Raises SpawnError."""
        env = {**os.environ, **config.environment()}
        python = find_python(config.python, env.get("PATH"))
        try:
            self._staging.renew()
        except LucevisorError as error:
            raise SpawnError(str(error), configuration=True) from error
        directory = self._staging.directory
        daemon_env = environment(config, threads, directory, os.environ)
        command = [*daemon_command(config, threads, python), f"--rows={self._rows_host}"]
        tcp = config.transport == "tcp"
        return spawn(command, daemon_env, directory, on_line, on_exit, n_links=n_links, tcp=tcp)
