"""Which model a state belongs to: one number over everything that decides what the numbers of a state mean.

Pure over an opened model and the digests of its tensors (``lucevisor.deployment.weight_digests``).  Invariant: two
models with the same fingerprint have the same architecture, metadata (tokenizer and chat template included), tensor
names, shapes and storage types, the same bytes in every tensor, used or not, and the same model options.  How the file
is split into parts, and the order of its tensors and keys, do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import ModelSpec

_VERSION = "lucevisor model fingerprint 2"
_OF_THE_PARTS = "split."  # metadata of a split file: how many parts, which one


def fingerprint(spec: ModelSpec, digests: Mapping[str, str], options: Mapping[str, str] | None = None) -> str:
    """64 hex digits: sha256 over one ASCII line a fact.  ``digests``: of all bytes of each tensor, by name.

    ``options`` are the model options the spec was read with; one that is "default", or changes nothing for this file,
    counts as not given.  Raises ValueError when the spec's files are not open, KeyError for a tensor without a digest.
    """
    if spec.files is None:
        raise ValueError(f"the files of {spec.name} are not open: read the spec with open_spec")
    files = spec.files
    digest = sha256()
    heeded = sorted((k, v) for k, v in (options or {}).items() if k in spec.options and v != "default")
    for fact in (_VERSION, spec.architecture, *_metadata(files), *_tensors(files, digests), *heeded):
        # ascii(): unlike repr() the same in every version of Python; the escapes make a line break impossible
        digest.update(ascii(fact).encode("ascii") + b"\n")
    return digest.hexdigest()


def _metadata(files: GgufFiles) -> list[object]:
    return [(key, files.metadata[key]) for key in sorted(files.metadata) if not key.startswith(_OF_THE_PARTS)]


def _tensors(files: GgufFiles, digests: Mapping[str, str]) -> list[object]:
    rows = (files.tensors[name] for name in sorted(files.tensors))
    return [(t.name, t.kind.name, t.shape, digests[t.name]) for t in rows]
