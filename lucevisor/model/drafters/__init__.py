"""Drafters of speculative decoding: read their files and specs.  One file per kind; docs/speculation.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lucevisor.model.drafters import dflash, draft_model, gemma4_assistant, mtp
from lucevisor.model.drafters.checkpoint import CONFIG, checkpoint_paths, open_checkpoint
from lucevisor.model.drafters.spec import DraftSpec
from lucevisor.model.gguf_files import GgufFiles, open_model, part_paths
from lucevisor.model.spec import ModelSpec

__all__ = ["DraftSpec", "draft_paths", "open_draft", "read_draft_spec"]


def draft_paths(path: Path) -> tuple[Path, ...]:
    """All files of the drafter that ``path`` names: GGUF, or the directory or a file of a checkpoint."""
    if path.is_dir():
        return checkpoint_paths(path)
    if path.name == CONFIG or path.suffix == ".safetensors":
        return checkpoint_paths(path.parent)
    return part_paths(path)


def open_draft(paths: Sequence[Path]) -> GgufFiles:
    return open_checkpoint(paths) if paths[0].name == CONFIG else open_model(paths)


def read_draft_spec(
    files: GgufFiles, target: ModelSpec, kind: str, options: Mapping[str, str] | None = None
) -> DraftSpec:
    """Read the spec of a drafter of ``target``; ``files``: those of the target for a head inside them.

    ``kind``: a :class:`lucevisor.protocol.loading.DraftKind`; ``options``: the target's.  Raises GgufError.
    """
    if kind == "dflash":
        return dflash.read(files, target)
    if kind == "model":
        return draft_model.read(files, target, options or {})
    if files.metadata.get("general.architecture") == gemma4_assistant.ARCHITECTURE:
        return gemma4_assistant.read(files, target)
    return mtp.read(files, target, options or {})
