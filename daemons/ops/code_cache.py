"""Where compiled kernels and their limits are kept between processes: the user's cache, in files named by all that they
are made of.

Knows names and bytes, no compiler.  Invariant: a file is there whole or not at all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def cache_directory() -> Path | None:
    """A directory of this user's alone, as code is loaded from it; None where there can be none."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        directory = (base if base.is_absolute() else Path.home() / ".cache") / "lucevisor"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(directory, os.W_OK) and directory.stat().st_uid == os.geteuid():
            return directory
    except (OSError, RuntimeError):
        pass  # a home that is not there, read-only or unknown
    return None


def keep(directory: Path, name: str, data: bytes) -> Path:
    """Write a file, and return where.  Raises OSError."""
    fd, written = tempfile.mkstemp(dir=directory)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)  # else a machine that stops now may leave the name with holes for bytes
        os.replace(written, directory / name)
    except OSError:
        os.unlink(written)
        raise
    return directory / name


def kept(name: str, make: Callable[[], bytes]) -> bytes:
    """The bytes of that name, made and kept if they are not there.  Raises what ``make`` raises."""
    directory = cache_directory()
    if directory is None:
        return make()
    with suppress(OSError):
        if found := (directory / name).read_bytes():
            return found
    made = make()
    with suppress(OSError):  # a full disk: the next process makes it again
        keep(directory, name, made)
    return made
