"""Contents of a snapshot: the tensors of a prefix slot, and the records around them.

Pure: numbers and names; ``file_format`` knows the bytes.  Invariant: the tensors of a slot follow from layer table,
length and kv dtype alone, so a file written under one layer split is readable under any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

import msgspec

from lucevisor.kv.residency import PagedOut
from lucevisor.kv.tokens import TOKEN_BYTES, TokenBuffer
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import SCALE, Dtype, LayerRange, Space
from lucevisor.protocol.messages import SnapshotTensor

Q8_GROUP = 32
TARGET, DRAFT = "layers", "draft"
"""First part of a tensor's name: it is of a layer of the model, or of its drafter."""
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}
"""The number formats of the file, as safetensors writes them."""

_STORED = {Dtype.FLOAT32: "F32", Dtype.BFLOAT16: "BF16", Dtype.FLOAT16: "F16"}


class Fault(StrEnum):
    """Why a file is refused: a metric label."""

    TRUNCATED = "truncated"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    OLDER = "older"
    NEWER = "newer"
    OTHER_MODEL = "other_model"
    MISFIT = "misfit"  # of this model, but with other state tensors
    GONE = "gone"
    UNREADABLE = "unreadable"


class SnapshotError(Exception):
    """A file is not a usable snapshot; ``where`` and ``reason`` say why."""

    def __init__(self, fault: Fault, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.fault, self.where, self.reason = fault, where, reason


class NextToken(msgspec.Struct, frozen=True):
    """The model's best token after the slot, by which a restored state is verified.

    ``input`` None: the prediction for position n_tokens, from the logits of the slot's last token.  Otherwise the token
    fed at position n_tokens; the prediction is for position n_tokens + 1, which a restored state can compute.
    ``top``: the best (id, log-probability) pairs, best first.
    """

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []
    input: int | None = None

    def agrees(self, token: int, tolerance: float = 0.0) -> bool:
        """Whether ``token`` is the recorded one, or in ``top`` and at most ``tolerance`` nats less likely."""
        best = self.logprob if self.logprob is not None else (self.top[0][1] if self.top else None)
        near = best is not None and any(i == token and best - p <= tolerance for i, p in self.top)
        return token == self.token or near


@dataclass(frozen=True, slots=True)
class DraftModel:
    """What defines the state of a drafter."""

    fingerprint: str
    layers: tuple[LayerSpec, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class StateModel:
    """What defines the state of a loaded model and its drafter."""

    fingerprint: str
    architecture: str
    name: str
    dtype: Dtype  # of activations: it decides the last bits of states
    kv_dtype: Dtype
    layers: tuple[LayerSpec, ...] = field(repr=False)
    draft: DraftModel | None = None

    @property
    def whole_only(self) -> bool:
        """Whether a slot is usable at its full length only: a recurrent state or window belongs to one position."""
        return whole_only(self.layers)


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A prefix slot to write: tokens, time, next token."""

    tokens: Sequence[int]
    created_s: float  # Unix time
    next_token: NextToken | None = None
    with_draft: bool = False  # the drafter's state is there too
    paged_out: PagedOut | None = None  # which pages were in host memory, with KV Flash


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """A header, read or to be written.  ``packed_tokens``: ids as little-endian uint32.

    ``draft_fingerprint``: of the drafter whose state it holds too, or empty.
    """

    fingerprint: str
    architecture: str
    model: str
    dtype: Dtype
    kv_dtype: Dtype
    packed_tokens: bytes = field(repr=False)
    created_s: float
    next_token: NextToken | None
    tensors: tuple[SnapshotTensor, ...] = field(repr=False)
    checksums: Mapping[str, str] = field(repr=False)  # tensor name -> xxh3_64, 16 hex digits
    data_start: int
    draft_fingerprint: str = ""
    paged_out: PagedOut | None = field(default=None, repr=False)

    @property
    def n_tokens(self) -> int:
        return len(self.packed_tokens) // TOKEN_BYTES

    @property
    def tokens(self) -> TokenBuffer:
        return TokenBuffer.from_packed(self.packed_tokens)

    @property
    def file_bytes(self) -> int:
        return self.data_start + sum(t.n_bytes for t in self.tensors)

    def of_layers(self, layers: LayerRange) -> list[SnapshotTensor]:
        """Return the tensors that a daemon with these layers writes and reads."""
        return [t for t in self.tensors if t.layer in layers and not t.draft]

    def of_draft(self) -> list[SnapshotTensor]:
        """Return the tensors that the daemon of the draft stage writes and reads."""
        return [t for t in self.tensors if t.draft]


# ---- tensors


def whole_only(layers: Sequence[LayerSpec]) -> bool:
    """Return whether state of these layers is usable at its full length only."""
    return any(layer.space is not Space.FULL for layer in layers)


def first_visible(layer: LayerSpec, n_tokens: int) -> int:
    """Return the oldest position of a slot that the next token sees in this layer."""
    return max(0, n_tokens - layer.window + 1) if layer.space is Space.WINDOW and layer.window else 0


def slot_tensors(
    layers: Sequence[LayerSpec], n_tokens: int, kv_dtype: Dtype, *, draft: bool = False
) -> list[SnapshotTensor]:
    """Return the tensors of a slot of ``n_tokens``, with offsets 0, sorted by item size, layer and kind.

    In this order each tensor starts at a multiple of its item size, whatever the lengths.  ``draft``: the layers are
    a drafter's.
    """
    found: list[SnapshotTensor] = []
    for layer in layers:
        first = first_visible(layer, n_tokens)
        for state in layer.state:
            shape = state.shape if layer.space is Space.RECURRENT else (n_tokens - first, *state.shape[1:])
            for kind, dtype, extents in _stored(state.name, state.dtype or kv_dtype, shape):
                name = f"{DRAFT if draft else TARGET}.{layer.index}.{kind}"
                n_bytes = tensor_bytes(dtype, extents)
                found.append(SnapshotTensor(name, layer.index, kind, dtype, extents, 0, n_bytes, first, draft))
    return sorted(found, key=lambda t: (-ITEM_BYTES[t.dtype], t.layer, t.kind))


def unit_tensors(
    layers: Sequence[LayerSpec], n_tokens: int, kv_dtype: Dtype, *, draft: bool = False
) -> list[SnapshotTensor]:
    """Return the tensors, with offsets 0, of pages that hold ``n_tokens`` positions, or of one recurrent state; the
    ``layers`` are of one space, with ``draft`` of a drafter.
    """
    whose = DRAFT if draft else TARGET
    return [
        SnapshotTensor(
            f"{whose}.{layer.index}.{kind}",
            layer.index,
            kind,
            dtype,
            extents,
            0,
            tensor_bytes(dtype, extents),
            draft=draft,
        )
        for layer in layers
        for state in layer.state
        for kind, dtype, extents in _stored(
            state.name,
            state.dtype or kv_dtype,
            state.shape if layer.space is Space.RECURRENT else (n_tokens, *state.shape[1:]),
        )
    ]


def _stored(kind: str, dtype: Dtype, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (kind, dtype, shape) as stored: q8_0 as int8 codes plus a float16 scale per group of 32."""
    if dtype is not Dtype.Q8_0:
        return [(kind, _STORED[dtype], shape)]
    n_groups = -(-shape[-1] // Q8_GROUP)
    return [(kind, "I8", (*shape[:-1], n_groups * Q8_GROUP)), (kind + SCALE, "F16", (*shape[:-1], n_groups))]


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    return prod(shape) * ITEM_BYTES[dtype]


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian uint32.  Raises ValueError for an id that does not fit into 32 bits."""
    try:
        return TokenBuffer.of(tokens).packed()
    except OverflowError as error:
        raise ValueError(f"a token id is not in 0 to 4294967295: {error}") from error


# ---- compatibility


def check_fits(snapshot: SnapshotHeader, model: StateModel) -> None:
    """Raise SnapshotError unless the file holds exactly the state of this model's layers.

    Another kv dtype is accepted: the daemons convert.  The state of another drafter is not looked at.
    """
    if snapshot.fingerprint != model.fingerprint:
        raise SnapshotError(
            Fault.OTHER_MODEL,
            "model_fingerprint",
            f"is that of {snapshot.model!r} ({snapshot.fingerprint[:16]}), running is {model.name!r} "
            f"({model.fingerprint[:16]})",
        )
    n, kv_dtype = snapshot.n_tokens, snapshot.kv_dtype
    _check_tensors([t for t in snapshot.tensors if not t.draft], slot_tensors(model.layers, n, kv_dtype))
    if model.draft is not None and holds_draft(snapshot, model, n):
        _check_tensors(snapshot.of_draft(), slot_tensors(model.draft.layers, n, kv_dtype, draft=True))


def holds_draft(snapshot: SnapshotHeader, model: StateModel, n_tokens: int) -> bool:
    """Return whether the file holds the state of the drafter that runs, for its first ``n_tokens``."""
    if model.draft is None or snapshot.draft_fingerprint != model.draft.fingerprint:
        return False
    return n_tokens == snapshot.n_tokens or not whole_only(model.draft.layers)


def _check_tensors(tensors: Sequence[SnapshotTensor], expected: Sequence[SnapshotTensor]) -> None:
    wanted, found = ({t.name: t for t in some} for some in (expected, tensors))
    for name in wanted.keys() - found.keys() | found.keys() - wanted.keys():
        raise SnapshotError(
            Fault.MISFIT, f"tensor {name}", "is missing" if name in wanted else "is not one of this model"
        )
    for name, tensor in found.items():
        if msgspec.structs.replace(tensor, offset=0) != wanted[name]:
            raise SnapshotError(
                Fault.MISFIT,
                f"tensor {name}",
                f"{tensor.dtype} {list(tensor.shape)} from position {tensor.first}, this model has "
                f"{wanted[name].dtype} {list(wanted[name].shape)} from {wanted[name].first}",
            )
