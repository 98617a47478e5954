"""A daemon's view of this project: a directory with `daemons`, `lucevisor.model` and `lucevisor.protocol`.

Knows no processes. Invariant: the directory is owned by this user with mode 0700 and holds links to exactly those
packages of the running supervisor, so a foreign interpreter never sees the supervisor's site-packages, and both sides
run the same protocol code.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

import lucevisor
from lucevisor.errors import LucevisorError
from lucevisor.protocol.handshake import SHARED_PACKAGES, source_hash
from lucevisor.source_tree import locate

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
    own = Path(lucevisor.__file__).resolve().parent
    daemons = locate("daemons")
    if not (daemons / "__main__.py").is_file():
        raise LucevisorError(f"{daemons}: the daemons' code is missing; install lucevisor again")
    found = os.lstat(run_dir)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise LucevisorError(f"{run_dir} is not a directory of user {os.geteuid()}; remove it or set XDG_RUNTIME_DIR")
    staging = run_dir / _NAME
    if staging.is_symlink() or staging.is_file():
        staging.unlink()
    elif staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(mode=0o700)
    (staging / "lucevisor").mkdir(mode=0o700)
    (staging / _DAEMONS).symlink_to(daemons)
    (staging / "lucevisor" / "__init__.py").symlink_to(own / "__init__.py")
    for name in SHARED_PACKAGES:
        (staging / "lucevisor" / name).symlink_to(own / name)
    return StagedPackages(staging, source_hash(own, daemons))
