"""Draft models: a smaller model with the target's vocabulary drafts token by token (``draft.kind = "model"``).

Any family whose layers all attend to all positions; its pages have the target's ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lucevisor.model.drafters.spec import DraftSpec
from lucevisor.model.families import read_spec
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import KvGroup

ARCHITECTURE = "model"
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True, slots=True)
class DraftModelParams:
    """``family``: the spec of the whole model, as it would be served."""

    family: ModelSpec


def read(files: GgufFiles, target: ModelSpec, options: Mapping[str, str]) -> DraftSpec:
    """Read a draft model and check that it can draft for ``target``.  Raises GgufError."""
    spec, file = read_spec(files, options), str(files.paths[0])
    if not spec.pooling.generates:
        raise GgufError(file, "draft model", f"{spec.name} is made for embeddings or ranking, and generates nothing")
    if spec.kv_groups() != {KvGroup.FULL}:
        reason = f"{spec.architecture!r} has layers with a window or recurrent state; a draft model has full attention"
        raise GgufError(file, "metadata value 'general.architecture'", reason)
    if KvGroup.FULL not in target.kv_groups():
        raise GgufError(file, "draft model", f"{target.name} has no layer with full attention, whose pages it shares")
    own, theirs = files.metadata.get(_TOKENS), target.files.metadata.get(_TOKENS)
    if spec.vocabulary > target.vocabulary or own != theirs:
        reason = f"differs from that of {target.name}: a draft model has the same vocabulary"
        raise GgufError(file, f"metadata value {_TOKENS!r}", reason)
    model = replace(spec, architecture=ARCHITECTURE, params=DraftModelParams(spec))
    return DraftSpec(model, 1, files, frozenset(), (), max_drafts=15, default_drafts=4)
