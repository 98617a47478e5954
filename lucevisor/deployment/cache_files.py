"""Small files in the user's cache directory: what a later start would otherwise compute again.

Knows nothing of what is in them.  Invariant: a reader sees a file whole, as it was or as it is, or not at all.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/lucevisor``; a relative value counts as not set."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "lucevisor"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file, and its directory if need be.  Raises OSError, which leaves ``path`` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise
