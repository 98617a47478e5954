"""Source hash: identifies the code that both ends run, so two versions never talk to each other by mistake.

Knows files, no frames.  Invariant: equal hashes mean equal names and bytes of every Python file of the three packages.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from lucevisor.protocol.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

SHARED_PACKAGES = ("model", "protocol")
"""Packages of lucevisor that daemons import."""

_N_DIGITS = 16


def source_hash(lucevisor: Path, daemons: Path) -> str:
    """16 hex digits over the names and bytes of the ``*.py`` files of the shared packages and the daemon's own.

    The daemon passes the directories it imported from, the supervisor those it puts on the daemon's path.
    ProtocolError when a directory has no Python files, OSError when one cannot be read.
    """
    digest = sha256()
    for label, directory in (*((name, lucevisor / name) for name in SHARED_PACKAGES), ("daemons", daemons)):
        paths = sorted(_sources(directory), key=lambda path: path.relative_to(directory).as_posix())
        if not paths:
            raise ProtocolError("no Python files", str(directory), "pass the directory of the installed package")
        for path in paths:
            name = f"{label}/{path.relative_to(directory).as_posix()}".encode()
            data = path.read_bytes()
            # Length-prefixed: no content can imitate the boundary between two files.
            digest.update(len(name).to_bytes(4, "little") + name + len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()[:_N_DIGITS]


def _sources(directory: Path) -> Iterable[Path]:
    return (path for path in directory.rglob("*.py") if path.is_file())
