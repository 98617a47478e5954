"""Acts as a user without rights, which only root can."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that everybody may enter, as a run directory never is; short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="lv", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def connect_as_nobody(path: Path) -> socket.socket:
    path.chmod(0o777)
    sock = socket.socket(socket.AF_UNIX)
    with as_nobody():
        sock.connect(str(path))
    sock.setblocking(False)
    return sock
