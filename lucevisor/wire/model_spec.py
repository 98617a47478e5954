"""What a model is made of: one :class:`LayerSpec` a layer, the one table that planner, pools, snapshots and blocks read.

Built from a GGUF header alone.  A family contributes one file in ``wire/families``; nothing else here knows a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from lucevisor.wire.gguf_files import GgufFiles
from lucevisor.wire.gguf_header import GgufError, TensorInfo, Value
from lucevisor.wire.values import PAGE_TOKENS, Dtype, LayerRange, Space, dtype_bytes


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state.  ``shape`` is that of one unit: a page (first axis: 64 positions) or a recurrent state.

    ``dtype`` None: the configured kv dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype | None = None

    def n_bytes(self, kv_dtype: Dtype) -> int:
        rows = prod(self.shape[:-1])
        return rows * dtype_bytes(self.dtype or kv_dtype, self.shape[-1])


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: where its state lives, what it weighs, what it needs from others.

    ``tensors``: name in the file -> row-major shape.  ``shares_with``: the layer whose pages this one reads instead of
    owning any (it must be on the same shard).  ``window``: positions a sliding layer sees, itself included; 0 = all.
    """

    index: int
    space: Space
    tensors: Mapping[str, tuple[int, ...]]
    state: tuple[StateTensor, ...]
    window: int = 0
    shares_with: int | None = None

    def unit_bytes(self, kv_dtype: Dtype) -> int:
        """Bytes of one page (or one recurrent state) of this layer."""
        return sum(t.n_bytes(kv_dtype) for t in self.state)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model of some family.  ``params`` is the family's own frozen record of hyperparameters.

    ``boundary_width``: numbers a token that cross a boundary (the hidden states, plus what a family adds).
    """

    architecture: str
    name: str
    quant: str
    embedding: int
    vocabulary: int
    context_tokens: int
    layers: tuple[LayerSpec, ...]
    head: Mapping[str, tuple[int, ...]]  # loaded by the first stage
    tail: Mapping[str, tuple[int, ...]]  # loaded by the last stage
    boundary_width: int
    params: object
    skipped: tuple[str, ...] = ()  # tensors of the file that are known and not used, such as an MTP block
    files: GgufFiles | None = field(default=None, repr=False, compare=False)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def window(self) -> int:
        """Longest window of the sliding layers; 0 when there are none."""
        return max((layer.window for layer in self.layers if layer.space is Space.WINDOW), default=0)

    def spaces(self) -> frozenset[Space]:
        return frozenset(layer.space for layer in self.layers)

    def tensor_names(self, layers: LayerRange, *, first: bool, last: bool) -> list[str]:
        """Names of all tensors a shard of ``layers`` loads, in file order of use."""
        names = list(self.head) if first else []
        for i in range(layers.start, layers.stop):
            names += self.layers[i].tensors
        return names + [n for n in self.tail if last and n not in names]

    def legal_boundary(self, boundary: int) -> bool:
        """Whether the chain may be cut before layer ``boundary``: no layer behind the cut reads pages in front of it."""
        return all(x.shares_with is None or x.shares_with >= boundary for x in self.layers[boundary:])

    def unit_bytes(self, space: Space, layers: LayerRange, kv_dtype: Dtype) -> int:
        """Bytes that one page (or state) of ``space`` takes on a shard of ``layers``."""
        return sum(x.unit_bytes(kv_dtype) for x in self.layers[layers.start : layers.stop] if x.space is space)


class Keys:
    """Typed reading of metadata under an architecture's prefix.  A missing or wrong value raises GgufError naming the key."""

    def __init__(self, metadata: Mapping[str, Value], prefix: str, file: str) -> None:
        self.metadata, self.prefix, self.file = metadata, prefix, file

    def _fail(self, key: str, reason: str) -> GgufError:
        return GgufError(self.file, f"metadata value {self.prefix}.{key!s}", reason)

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.metadata

    def raw(self, key: str) -> Value | None:
        return self.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._fail(key, "is missing" if value is None else f"is {value!r}, expected a whole number")
        if not low <= value <= high:
            raise self._fail(key, f"is {value}, expected {low} to {high}")
        return value

    def integers(self, key: str, n: int, default: int | None = None) -> list[int]:
        """A number per layer: an array of ``n``, or one number for all."""
        value = self.raw(key)
        if isinstance(value, list):
            if len(value) < n or not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value):
                raise self._fail(key, f"is an array of {len(value)}, expected {n} whole numbers")
            return [int(v) for v in value[:n] if isinstance(v, int)]
        return [self.integer(key, default, low=0)] * n

    def flags(self, key: str, n: int) -> list[bool] | None:
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < n:
            raise self._fail(key, f"expected an array of at least {n} flags")
        return [bool(v) for v in value[:n]]

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._fail(key, "is missing" if value is None else f"is {value!r}, expected a number")
        if value != value or value in (float("inf"), float("-inf")):
            raise self._fail(key, f"is {value}, expected a finite number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._fail(key, f"is {value!r}, expected a text")
        return value


def attention_state(n_kv_heads: int, key_dim: int, value_dim: int) -> tuple[StateTensor, ...]:
    """Keys and values of one page: ``[64, K, D]`` each, in the configured kv dtype."""
    return (
        StateTensor("k", (PAGE_TOKENS, n_kv_heads, key_dim)),
        StateTensor("v", (PAGE_TOKENS, n_kv_heads, value_dim)),
    )


def check_tensors(files: GgufFiles, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise GgufError naming file and tensor when one is missing or has another shape than the hyperparameters say."""
    for name, shape in expected.items():
        found = files.tensors.get(name)
        if found is None:
            raise GgufError(str(files.paths[0]), f"tensor {name!r}", "is missing: the file is incomplete or of another family")
        if found.shape != shape:
            raise GgufError(
                str(files.paths[found.part]), f"tensor {name!r}", f"has shape {list(found.shape)}, the metadata ask for {list(shape)}"
            )


def main_quant(files: GgufFiles) -> str:
    """The storage type that holds most bytes of the file: what people call the file's quant."""
    by: dict[str, int] = {}
    for t in files.tensors.values():
        by[t.kind.name] = by.get(t.kind.name, 0) + t.n_bytes
    return max(by, key=lambda k: by[k]) if by else "none"


def tensor(files: GgufFiles, name: str) -> TensorInfo:
    """The tensor of that name.  Raises GgufError when it is not there."""
    found = files.tensors.get(name)
    if found is None:
        raise GgufError(str(files.paths[0]), f"tensor {name!r}", "is missing: the file is incomplete or of another family")
    return found
