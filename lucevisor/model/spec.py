"""Model spec: one :class:`LayerSpec` per layer, the single table that planner, pools, snapshots and blocks read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from math import prod

from lucevisor.model.gguf_files import NO_FILES, GgufFiles
from lucevisor.model.gguf_header import GgufError, TensorInfo, Value
from lucevisor.model.lora import LoraAdapter
from lucevisor.model.values import PAGE_TOKENS, Dtype, KvGroup, LayerRange, dtype_bytes

Shapes = dict[str, tuple[int, ...]]
"""Name in the file -> row-major shape."""
MAX_LAYERS = 1024
"""More layers than any model has: a header that claims 2^31 must not cost their memory."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state (KV cache or recurrent state).

    ``shape``: of a page (first axis: 64 positions) or a recurrent state.  ``dtype`` None: the configured kv dtype.
    ``update_width``: float32 numbers for what one token does to it, from which the state after verified tokens is made;
    0 where each state is written whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype | None = None
    update_width: int = 0

    def n_bytes(self, kv_dtype: Dtype) -> int:
        rows = prod(self.shape[:-1])
        return rows * dtype_bytes(self.dtype or kv_dtype, self.shape[-1])


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A layer's rows (``axis`` 0) or columns (1) [``start``, ``stop``) of a matrix with data of every layer."""

    full_shape: tuple[int, int]
    axis: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        n = self.stop - self.start
        return (n, self.full_shape[1]) if self.axis == 0 else (self.full_shape[0], n)


def update_width(n_key: int, n_value: int, dim: int) -> int:
    """Float32 numbers of what a token does to a gated delta net: keys, errors, decays (a multiple of four)."""
    return (n_key + n_value) * dim + -(-n_value // 4) * 4


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: its state, its tensors, and its dependencies on other layers.

    ``tensors``: name in the file -> row-major shape; ``parts``: of tensors that hold data of every layer.
    ``shares_with``: the layer whose pages this one reads instead of owning any.  ``window``: positions visible to a
    sliding-window layer, the current one included; 0 = all.  ``n_routed``: routed experts per token.
    """

    index: int
    kv_group: KvGroup
    tensors: Mapping[str, tuple[int, ...]]
    state: tuple[StateTensor, ...]
    window: int = 0
    shares_with: int | None = None
    parts: Mapping[str, MatrixPart] = field(default_factory=dict)
    n_routed: int = 0

    def unit_bytes(self, kv_dtype: Dtype) -> int:
        return sum(t.n_bytes(kv_dtype) for t in self.state)

    def device_unit_bytes(self, kv_dtype: Dtype) -> int:
        """Bytes on a device, with those of an update."""
        return self.unit_bytes(kv_dtype) + self.update_bytes

    def draft_state_bytes(self, kv_dtype: Dtype) -> int:
        """Bytes of a verified draft's recurrent state: updates where they stand for it."""
        return self.update_bytes + sum(t.n_bytes(kv_dtype) for t in self.state if not t.update_width)

    @property
    def update_bytes(self) -> int:
        return sum(4 * t.update_width for t in self.state)


class PoolingType(IntEnum):
    """Values of ``ARCHITECTURE.pooling_type``: which rows of a text's last hidden state make its result."""

    NONE = 0
    MEAN = 1
    CLS = 2  # the first row
    LAST = 3
    RANK = 4  # a classifier's scores


@dataclass(frozen=True, slots=True)
class Pooling:
    """The pooling of a text's hidden states to ``width`` numbers (0: all).

    ``bidirectional``: tokens see those after them.  ``generates``: the model also has logits of the next token.
    """

    kind: PoolingType = PoolingType.LAST
    width: int = 0
    bidirectional: bool = False
    generates: bool = True

    @property
    def whole_texts(self) -> bool:
        """True if a text must be computed in one step."""
        return self.bidirectional or self.kind in (PoolingType.MEAN, PoolingType.CLS)

    @property
    def ranks(self) -> bool:
        """True if the result is the score of a pair of texts, and no embedding."""
        return self.kind is PoolingType.RANK


LAST_ROW = Pooling()
"""That of a chat model."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model of some family.  ``params``: the family's own frozen record of hyperparameters.

    ``boundary_width``: numbers per token that cross a boundary.  ``embedding_scale`` multiplies rows of the token
    table. ``options``: those that affect this file.  ``mrope``: tokens of images have positions in three axes;
    ``whole_images``: in sliding layers they see those behind them, so an image lies in one slice.
    """

    architecture: str
    name: str
    quant: str
    hidden_size: int
    vocabulary: int
    context_tokens: int
    layers: tuple[LayerSpec, ...]
    embedding_tensors: Mapping[str, tuple[int, ...]]  # loaded by the shard that embeds tokens
    output_tensors: Mapping[str, tuple[int, ...]]  # loaded by the shard that computes logits
    boundary_width: int
    params: object
    shared_tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # small, loaded by every shard
    options: frozenset[str] = frozenset()
    embedding_scale: float = 1.0
    pooling: Pooling = LAST_ROW
    mrope: bool = False
    whole_images: bool = False
    skipped: tuple[str, ...] = ()  # unused tensors of the file, such as an MTP block
    files: GgufFiles = field(default=NO_FILES, repr=False, compare=False)
    adapters: tuple[LoraAdapter, ...] = field(default=(), repr=False, compare=False)

    @property
    def pooled_width(self) -> int:
        return self.pooling.width or self.hidden_size

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def window(self) -> int:
        """Longest window of the sliding-window layers; 0 if none."""
        return max((layer.window for layer in self.layers if layer.kv_group is KvGroup.WINDOW), default=0)

    def kv_groups(self) -> frozenset[KvGroup]:
        return frozenset(layer.kv_group for layer in self.layers)

    def legal_boundary(self, boundary: int) -> bool:
        """Return whether the model may be split before a layer: no later one reads pages of an earlier one."""
        return all(x.shares_with is None or x.shares_with >= boundary for x in self.layers[boundary:])

    def unit_bytes(self, kv_group: KvGroup, layers: LayerRange, kv_dtype: Dtype) -> int:
        return sum(x.unit_bytes(kv_dtype) for x in self.layers[layers.start : layers.stop] if x.kv_group is kv_group)

    def draft_state_bytes(self, layers: LayerRange, kv_dtype: Dtype) -> int:
        recurrent = (x for x in self.layers[layers.start : layers.stop] if x.kv_group is KvGroup.RECURRENT)
        return sum(x.draft_state_bytes(kv_dtype) for x in recurrent)


class Keys:
    """Typed access to the metadata under an architecture's prefix.  Raises GgufError naming the key."""

    def __init__(self, metadata: Mapping[str, Value], prefix: str, file: str) -> None:
        self.metadata, self.prefix, self.file = metadata, prefix, file

    def error(self, key: str, reason: str) -> GgufError:
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
            raise self.error(key, "is missing" if value is None else f"is {value!r}, expected an integer")
        if not low <= value <= high:
            raise self.error(key, f"is {value}, expected {low} to {high}")
        return value

    def integers(self, key: str, n: int, default: int | None = None) -> list[int]:
        """One number per layer, from an array or a single number."""
        value = self.raw(key)
        if isinstance(value, list):
            if len(value) < n or not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value):
                raise self.error(key, f"is an array of {len(value)}, expected {n} integers")
            return [int(v) for v in value[:n] if isinstance(v, int)]
        return [self.integer(key, default, low=0)] * n

    def flags(self, key: str, n: int) -> list[bool] | None:
        """One flag per layer; None when the key is missing."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < n or not all(isinstance(v, int) for v in value):
            raise self.error(key, f"expected an array of at least {n} flags")
        return [bool(v) for v in value[:n]]

    def sliding_layers(self, n: int, window: int, period: int, full_at: int) -> tuple[bool, ...]:
        """Which layers slide: an array, or a period (default ``period``) with one full layer, at place ``full_at``."""
        key = "attention.sliding_window_pattern"
        if not window:
            return (False,) * n
        if isinstance(self.raw(key), list):
            return tuple(self.flags(key, n) or ())
        period = self.integer(key, period)
        return tuple(i % period != full_at % period for i in range(n))

    def number(
        self, key: str, default: float | None = None, *, above: float | None = None, low: float | None = None
    ) -> float:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "is missing" if value is None else f"is {value!r}, expected a number")
        if value != value or value in (float("inf"), float("-inf")):
            raise self.error(key, f"is {value}, expected a finite number")
        if above is not None and not value > above:
            raise self.error(key, f"is {value}, expected more than {above:g}")
        if low is not None and value < low:
            raise self.error(key, f"is {value}, expected at least {low:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, expected true or false")
        return value

    def even(self, key: str, default: int | None, *, high: int) -> int:
        value = self.integer(key, default, low=2, high=high)
        if value % 2 or not 2 <= value <= high:
            raise self.error(key, f"is {value}, expected an even number, 2 to {high}")
        return value

    def head_dim(self, suffix: str = "", default: int | None = None) -> int:
        """``attention.key_length``, which ``value_length`` must equal; ``suffix`` as in "_swa"."""
        width = self.integer("attention.key_length" + suffix, default)
        if self.integer("attention.value_length" + suffix, width) != width:
            raise self.error("attention.value_length" + suffix, f"differs from key_length{suffix} {width}")
        return width

    def check_heads(self, n_heads: int, n_kv_heads: int) -> None:
        """Raise GgufError unless every kv head serves the same number of query heads."""
        if n_kv_heads < 1 or n_heads < 1 or n_heads % n_kv_heads:
            raise self.error("attention.head_count", f"is {n_heads}, not a multiple of {n_kv_heads} kv heads")

    def text(self, key: str, default: str) -> str:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, f"is {value!r}, expected a string")
        return value


def attention_state(n_kv_heads: int, key_dim: int, value_dim: int) -> tuple[StateTensor, ...]:
    """KV cache of one page: keys and values, ``[64, K, D]`` each, in the configured kv dtype."""
    return (
        StateTensor("k", (PAGE_TOKENS, n_kv_heads, key_dim)),
        StateTensor("v", (PAGE_TOKENS, n_kv_heads, value_dim)),
    )


def attention_layer(
    index: int, tensors: Shapes, state: tuple[StateTensor, ...], window: int = 0, *, n_routed: int = 0
) -> LayerSpec:
    return LayerSpec(index, KvGroup.WINDOW if window else KvGroup.FULL, tensors, state, window, n_routed=n_routed)


def attention_tensors(
    prefix: str,
    embedding: int,
    n_heads: int,
    n_kv_heads: int,
    dim: int,
    *,
    n_gates: int = 0,
    qk_norm: bool = True,
) -> Shapes:
    """Attention of the layer ``prefix``; ``n_gates``: rows of gates among those of the queries."""
    e, q, kv = embedding, n_heads * dim, n_kv_heads * dim
    norms = {prefix + "attn_q_norm.weight": (dim,), prefix + "attn_k_norm.weight": (dim,)} if qk_norm else {}
    return {
        prefix + "attn_q.weight": (q + n_gates, e),
        prefix + "attn_k.weight": (kv, e),
        prefix + "attn_v.weight": (kv, e),
        **norms,
        prefix + "attn_output.weight": (e, q),
    }


def swiglu_tensors(prefix: str, embedding: int, width: int, suffix: str = "") -> Shapes:
    rows = {f"{prefix}ffn_{name}{suffix}.weight": (width, embedding) for name in ("gate", "up")}
    return {**rows, f"{prefix}ffn_down{suffix}.weight": (embedding, width)}


def assemble(
    files: GgufFiles,
    keys: Keys,
    params: object,
    layers: Sequence[LayerSpec],
    *,
    carried: int = 0,
    shared: Mapping[str, tuple[int, ...]] | None = None,
    embedding_scale: float = 1.0,
    pooling: Pooling | None = None,
    inputs: Shapes | None = None,
    outputs: Shapes | None = None,
) -> ModelSpec:
    """Build the spec of a model with token embedding, output norm and output matrix (lm_head; the embedding if tied).

    ``carried``: numbers per token that cross a boundary beside the residual stream.  ``pooling``: by default as the
    file says.  ``inputs``: tensors beside the token table; ``outputs``: in place of the output norm.  Raises GgufError.
    """
    hidden_size = keys.integer("embedding_length")
    if pooling is None:
        pooling, head = read_pooling(files, keys)
    else:
        head = {}
    vocabulary = tensor(files, "token_embd.weight").shape[0]
    table = {"token_embd.weight": (vocabulary, hidden_size)}
    output = {"output.weight": (vocabulary, hidden_size)} if "output.weight" in files.tensors else table
    embedding_tensors = table | (inputs or {})
    ends = {"output_norm.weight": (hidden_size,)} if outputs is None else outputs
    output_tensors = ends | head | (output if pooling.generates else {})
    expected = {**embedding_tensors, **(shared or {}), **output_tensors}
    for layer in layers:
        expected |= {**layer.tensors, **{name: part.full_shape for name, part in layer.parts.items()}}
    check_tensors(files, expected)
    skipped = tuple(name for name in files.tensors if name not in expected)
    _check_layers(files, skipped, keys, len(layers))
    _check_gaps(files, expected.keys())
    return ModelSpec(
        architecture=keys.prefix,
        name=model_name(files),
        quant=main_quant(files),
        hidden_size=hidden_size,
        vocabulary=vocabulary,
        context_tokens=keys.integer("context_length", 4096),
        layers=tuple(layers),
        embedding_tensors=embedding_tensors,
        output_tensors=output_tensors,
        boundary_width=hidden_size + carried,
        params=params,
        shared_tensors=shared or {},
        embedding_scale=embedding_scale,
        pooling=pooling,
        options=frozenset({"yarn_attn_factor"} if keys.has("rope.scaling.yarn_attn_factor") else ()),
        skipped=skipped,
        files=files,
    )


SCORE = "cls.output.weight"
"""The matrix of a model that ranks: a row, or one of "yes" and one of "no"."""


def read_pooling(files: GgufFiles, keys: Keys) -> tuple[Pooling, Shapes]:
    """Read the pooling of a causal model, and the tensors of its head; a chat model's result is its last row."""
    value = keys.integer("pooling_type", 0, low=0)
    if value not in (PoolingType.NONE, PoolingType.MEAN, PoolingType.LAST, PoolingType.RANK):
        raise keys.error("pooling_type", f"is {value}; this family pools by 1 (mean), 3 (last) or 4 (rank)")
    kind = PoolingType(value)
    if kind is PoolingType.RANK:
        shape = tensor(files, SCORE).shape
        if shape[0] > 2:
            raise keys.error(
                "pooling_type", f"is 4 (rank) for {shape[0]} classes; this version ranks by one, or yes and no"
            )
        return Pooling(kind, width=1, generates=False), {SCORE: shape}
    return Pooling(kind or PoolingType.LAST, generates=kind is PoolingType.NONE), {}


def _check_layers(files: GgufFiles, unused: Sequence[str], keys: Keys, n_layers: int) -> None:
    """Raise GgufError for layers beyond the block count and for biases that the family does not add."""
    n_blocks = keys.integer("block_count")
    for name in unused:
        kind, _, name_in_layer = name.partition(".")
        index = name_in_layer.partition(".")[0]
        if kind != "blk" or not index.isdecimal():
            continue
        where = str(files.paths[files.tensors[name].part])
        if int(index) >= n_blocks:
            reason = f"is of no layer: {keys.prefix}.block_count is {n_blocks}; convert or download the file again"
            raise GgufError(where, f"tensor {name!r}", reason)
        if int(index) < n_layers and name.endswith(".bias"):
            raise GgufError(where, f"tensor {name!r}", f"is a bias, which this version's {keys.prefix} does not add")


def _check_gaps(files: GgufFiles, used: AbstractSet[str]) -> None:
    """Raise GgufError for a gap of more than the alignment behind a used tensor: its type or shape must be wrong."""
    alignment = files.metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)
    for before, after in pairwise(sorted(files.tensors.values(), key=lambda found: (found.part, found.offset))):
        gap = after.offset - before.offset - before.n_bytes
        if before.part == after.part and gap >= alignment and {before.name, after.name} <= used:
            raise GgufError(
                str(files.paths[before.part]),
                f"tensor {before.name!r}",
                f"{before.kind.name} {list(before.shape)} leaves {gap} bytes unused before {after.name!r}: its type or "
                "shape is wrong, or a tensor between them is not listed; download the file again",
            )


def check_tensors(files: GgufFiles, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise GgufError when a tensor is missing or has an unexpected shape."""
    for name, shape in expected.items():
        info = tensor(files, name)
        if info.shape != shape:
            reason = f"has shape {list(info.shape)}, the metadata require {list(shape)}"
            raise GgufError(str(files.paths[info.part]), f"tensor {info.name!r}", reason)


def model_name(files: GgufFiles) -> str:
    """``general.name`` without unprintable characters, or the stem of the first file."""
    name = files.metadata.get("general.name")
    printable = "".join(c if c.isprintable() else "?" for c in name.strip()[:200]) if isinstance(name, str) else ""
    return printable or files.paths[0].stem


def main_quant(files: GgufFiles) -> str:
    """The storage type with the most bytes."""
    by: dict[str, int] = {}
    for t in files.tensors.values():
        by[t.kind.name] = by.get(t.kind.name, 0) + t.n_bytes
    return max(by, key=lambda k: by[k]) if by else "none"


def tensor(files: GgufFiles, name: str) -> TensorInfo:
    info = files.tensors.get(name)
    if info is None:
        raise GgufError(
            str(files.paths[0]), f"tensor {name!r}", "is missing: the file is incomplete or of another family"
        )
    return info
