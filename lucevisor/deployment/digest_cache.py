"""Digests of a model's tensors, kept in the user's cache directory under the identity of its files.

One JSON file per model; the newest KEPT stay.  Nothing that goes wrong here is an error: the model is hashed again.
Invariant: digests that are read back were written, unchanged since, for files of the same device, inode, size, times
and header; a file with anything else is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from lucevisor.deployment.cache_files import write_atomically
from lucevisor.model.values import FileIdentity

KEPT = 32
MAX_BYTES = 64 << 20
"""Of one file: several times what a model of 100,000 tensors takes."""

_PREFIX = "weights-"
_DIGEST = re.compile("[0-9a-f]{32}")

log = structlog.get_logger("weights")


class _KeptDigests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a file.  ``version`` changes with the layout or the hash."""

    version: Literal[1] = 1
    identities: tuple[FileIdentity, ...]
    digests: dict[str, str]
    check: str = ""  # sha256 of the rest

    def checked(self) -> _KeptDigests:
        plain = msgspec.structs.replace(self, check="")
        return msgspec.structs.replace(self, check=sha256(msgspec.json.encode(plain)).hexdigest())


def path_of(directory: Path, identities: Sequence[FileIdentity]) -> Path:
    """Return where the digests of these files are kept."""
    return directory / f"{_PREFIX}{sha256(msgspec.json.encode(list(identities))).hexdigest()[:32]}.json"


def read(directory: Path, identities: Sequence[FileIdentity], tensors: Collection[str]) -> dict[str, str] | None:
    """Return the digests of ``tensors`` of these files, or None when there are none."""
    path = path_of(directory, identities)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        kept = msgspec.json.decode(data, type=_KeptDigests)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        log.warning("weight digests ignored", file=str(path), reason=str(error))
        return None
    reason = _reject_reason(kept, identities, tensors)
    if reason:
        log.warning("weight digests ignored", file=str(path), reason=reason)
        return None
    return kept.digests


def _reject_reason(kept: _KeptDigests, identities: Sequence[FileIdentity], tensors: Collection[str]) -> str:
    if kept.check != kept.checked().check:
        return "it is damaged: its checksum does not match"
    if kept.identities != tuple(identities) or kept.digests.keys() != set(tensors):
        return "it describes other files"
    return "" if all(map(_DIGEST.fullmatch, kept.digests.values())) else "it holds an invalid digest"


def write(directory: Path, identities: Sequence[FileIdentity], digests: dict[str, str]) -> None:
    """Keep ``digests``.  Logs a warning when they cannot be written."""
    path = path_of(directory, identities)
    data = msgspec.json.encode(_KeptDigests(identities=tuple(identities), digests=digests).checked())
    try:
        write_atomically(path, data)
        _prune(directory)
    except OSError as error:
        log.warning("weight digests not kept", file=str(path), reason=str(error))


def _prune(directory: Path) -> None:
    files = sorted(directory.glob(f"{_PREFIX}*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in files[KEPT:]:
        with suppress(OSError):
            path.unlink()
