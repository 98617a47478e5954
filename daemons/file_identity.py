"""Checks that a daemon loads the files that the supervisor means, unchanged before and after reading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from daemons.errors import LoadError
from lucevisor.model.gguf_files import GgufFiles, open_model
from lucevisor.model.lora_files import open_adapter, with_adapters
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import FileIdentity
from lucevisor.protocol.loading import Load

ADVICE = "leave the file alone while a daemon loads it"


def open_files(load: Load) -> GgufFiles:
    """Open the files of ``load``.  Raises GgufError, or LoadError when they are not those that it names."""
    return check_identities(open_model(tuple(map(Path, load.files))), load.identities)


def open_adapters(load: Load, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the adapters of ``load``, opened.  Raises as ``open_files`` does."""
    adapters = [open_adapter(one.name, Path(one.file), one.scale, spec) for one in load.adapters]
    for adapter, one in zip(adapters, load.adapters, strict=True):
        check_identities(adapter.files, [one.identity])
    return with_adapters(spec, adapters)


def check_identities(files: GgufFiles, identities: Sequence[FileIdentity]) -> GgufFiles:
    """Return ``files``, just opened.  Raises LoadError when they do not have the given identities, if any."""
    wanted = identities or files.identities
    changed = [path for path, a, b in zip(files.paths, files.identities, wanted, strict=True) if a != b]
    if changed:
        reason = "the file is not the one that the supervisor asked for: it was changed or replaced meanwhile"
        raise LoadError(str(changed[0]), reason, ADVICE)
    return files


def unchanged(files: GgufFiles) -> list[FileIdentity]:
    """Return the identities of the files read.  Raises LoadError when one changed meanwhile."""
    changed = files.changed()
    if changed:
        reason = "the file was changed while it was loaded, so the weights read are inconsistent"
        raise LoadError(str(changed[0]), reason, ADVICE)
    return list(files.identities)
