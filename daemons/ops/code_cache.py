"""Where compiled kernels are kept between processes: the user's cache, in files named by all that they are made of.

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
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    directory = Path(base) / "lucevisor"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(directory, os.W_OK) and directory.stat().st_uid == os.geteuid():
            return directory
    except OSError:
        pass  # a home that is not there or read-only
    return None


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
        fd, written = tempfile.mkstemp(dir=directory)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(made)
            os.replace(written, directory / name)
        except OSError:
            os.unlink(written)
            raise
    return made
