"""Opens LoRA adapters, and checks what their files say against the model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lucevisor.model.gguf_files import GgufFiles, open_model
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.lora import LoraAdapter, LoraPair
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Dtype, LayerRange
from lucevisor.model.weight_layout import TensorRole, matrix_role

EMBEDDING = "token_embd.weight"
_A, _B = ".lora_a", ".lora_b"


def open_adapter(name: str, path: Path, scale: float, spec: ModelSpec) -> LoraAdapter:
    """Open an adapter of the model ``spec``.  Raises GgufError, OSError."""
    files = open_model((path,))
    metadata = files.metadata
    wanted = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": spec.architecture}
    for key, value in wanted.items():
        if metadata.get(key) != value:
            reason = f"is {metadata.get(key, 'missing')!r}, expected {value!r}"
            raise GgufError(str(path), f"metadata value {key}", reason)
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < float("inf"):
        raise GgufError(str(path), "metadata value adapter.lora.alpha", f"is {alpha!r}, expected a finite number")
    if "adapter.alora.invocation_tokens" in metadata:
        reason = "is that of an activated LoRA, which begins at a token of the prompt; only plain ones are supported"
        raise GgufError(str(path), "metadata value adapter.alora.invocation_tokens", reason)
    return LoraAdapter(name, files, scale, float(alpha), _pairs(files, spec))


def with_adapters(spec: ModelSpec, adapters: Sequence[LoraAdapter]) -> ModelSpec:
    return replace(spec, adapters=tuple(adapters))


def adapter_bytes(spec: ModelSpec, layers: LayerRange, *, embedding: bool, output: bool, dtype: Dtype) -> int:
    if not spec.adapters:
        return 0
    names = shard_matrices(spec, layers, embedding=embedding, output=output)
    return sum(pair.n_bytes(dtype) for one in spec.adapters for name, pair in one.pairs.items() if name in names)


def shard_matrices(spec: ModelSpec, layers: LayerRange, *, embedding: bool, output: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the matrices on a shard that adapters may change."""
    found = {EMBEDDING: spec.embedding_tensors[EMBEDDING]} if embedding else {}
    tensors = [spec.layers[i].tensors for i in range(layers.start, layers.stop)]
    if output:
        tensors.append({name: shape for name, shape in spec.output_tensors.items() if name != EMBEDDING})
    return found | {
        name: shape
        for group in tensors
        for name, shape in group.items()
        if len(shape) == 2 and matrix_role(name, shape) is TensorRole.MATRIX
    }


def _pairs(files: GgufFiles, spec: ModelSpec) -> dict[str, LoraPair]:
    """Return the pairs of a file.  Raises GgufError."""
    matrices = shard_matrices(spec, LayerRange(0, spec.n_layers), embedding=True, output=True)
    pairs: dict[str, LoraPair] = {}

    def error(name: str, reason: str) -> GgufError:
        return GgufError(str(files.paths[0]), f"tensor {name!r}", reason)

    for name in files.tensors:
        base = name.removesuffix(_A) if name.endswith(_A) else name.removesuffix(_B)
        if base == name:
            raise error(name, f"is neither {_A} nor {_B} of a matrix, and is not supported; convert the adapter again")
        if base not in spec.files.tensors:
            raise error(name, f"is of no tensor of {spec.name}: the adapter is of another model")
        if base not in matrices:
            reason = "changes what adapters cannot change here: only matrices of layers, the token table and the output"
            raise error(name, reason + " can, and those of routed experts cannot")
        for one in (base + _A, base + _B):
            if one not in files.tensors:
                raise error(one, "is missing: the file is incomplete")
        if base in pairs:
            continue
        pair = LoraPair(files.tensors[base + _A], files.tensors[base + _B])
        (n_out, width), rank = matrices[base], pair.b.shape[-1]
        of_a, of_b = ((n_out, rank), (width, rank)) if base == EMBEDDING else ((rank, width), (n_out, rank))
        for tensor, shape in ((pair.a, of_a), (pair.b, of_b)):
            if tensor.shape != shape:
                reason = f"has shape {list(tensor.shape)}, expected {list(shape)}: the adapter is of another model"
                raise error(tensor.name, reason)
        pairs[base] = pair
    if not pairs:
        raise GgufError(str(files.paths[0]), "file", "has no tensors: convert the adapter again")
    return pairs
