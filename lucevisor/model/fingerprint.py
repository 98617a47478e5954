"""Model fingerprint: identifies the model that a saved state belongs to.

Equal ones mean equal architecture, metadata (with tokenizer and chat template), tensor names, shapes, types and bytes,
and model options.  Parts, and the order of tensors and keys, do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.lora import LoraAdapter
from lucevisor.model.spec import ModelSpec

_VERSION = "lucevisor model fingerprint 2"
_OF_THE_PARTS = "split."  # metadata of a split file: how many parts, which one


def fingerprint(
    spec: ModelSpec,
    digests: Mapping[str, str],
    options: Mapping[str, str] | None = None,
    computed_by: Sequence[str] = (),
) -> str:
    """64 hex digits: sha256 over one ASCII line per fact.  ``digests``: by tensor name.

    ``options``: those of the spec; "default" ones are ignored.  ``computed_by``: what else the bits of a state depend
    on.
    """
    files = spec.files
    digest = sha256()
    heeded = sorted((k, v) for k, v in (options or {}).items() if k in spec.options and v != "default")
    for fact in (_VERSION, spec.architecture, *_metadata(files), *_tensors(files, digests), *heeded, *computed_by):
        # ascii() is stable across Python versions, unlike repr(), and escapes line breaks
        digest.update(ascii(fact).encode("ascii") + b"\n")
    return digest.hexdigest()


def adapter_fingerprint(model: str, adapter: LoraAdapter, digests: Mapping[str, str]) -> str:
    facts = ("adapter", model, adapter.name, adapter.scale, adapter.alpha, *_tensors(adapter.files, digests))
    return sha256("\n".join(map(ascii, facts)).encode("ascii")).hexdigest()


def _metadata(files: GgufFiles) -> list[object]:
    return [(key, files.metadata[key]) for key in sorted(files.metadata) if not key.startswith(_OF_THE_PARTS)]


def _tensors(files: GgufFiles, digests: Mapping[str, str]) -> list[object]:
    rows = (files.tensors[name] for name in sorted(files.tensors))
    return [(t.name, t.kind.name, t.shape, digests[t.name]) for t in rows]
