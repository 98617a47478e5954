"""Small files in the user's cache directory.  Invariant: a reader gets the old file, the new file or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

log = structlog.get_logger("lucevisor.deployment")
T = TypeVar("T")


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/lucevisor``; a relative value counts as not set."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "lucevisor"


def read_json(path: Path, kind: type[T], what: str, reject_reason: Callable[[T], str]) -> T | None:
    """Return a file's contents, or None, with a warning unless it is missing."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
        reason = reject_reason(found)
        if not reason:
            return found
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        reason = str(error)
    log.warning(f"{what} ignored", file=str(path), reason=reason)
    return None


def write_json(path: Path, value: msgspec.Struct, what: str) -> None:
    try:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=1))
    except OSError as error:
        log.warning(f"{what} not saved", file=str(path), reason=str(error))


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
