"""The snapshot file: one safetensors file with the tensors of all shards of a prefix slot.

docs/snapshot-format.md is the specification.  Invariants: a file's tensors follow from layer table, length and kv dtype
alone, so any layer split can read it; :func:`parse` accepts only bytes that :func:`pack` made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256

import msgspec

from lucevisor.kv.page_table import PagedOut
from lucevisor.kv.tokens import TOKEN_BYTES, TokenBuffer
from lucevisor.kv_transfer.layout import ITEM_BYTES, slot_tensors, tensor_bytes, with_offsets
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import PAGE_TOKENS, Dtype, KvGroup
from lucevisor.protocol.messages import TransferTensor

FORMAT = "lucevisor-snapshot"
FORMAT_VERSION = 3

LENGTH_BYTES = 8
DATA_ALIGNMENT = 4096
"""Alignment of the tensors in bytes, so that mapping the file gives whole memory pages."""
MAX_HEADER_BYTES = 128 << 20
MAX_TOKENS = 1 << 24
"""Tokens of one file at most; more than any context."""


class Fault(StrEnum):
    """Reasons to refuse a file, as metric labels."""

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


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Properties that define the state of a drafter."""

    fingerprint: str
    layers: tuple[LayerSpec, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class StateModel:
    """Properties that define the state of a loaded model and its drafter."""

    fingerprint: str
    architecture: str
    name: str
    dtype: Dtype  # of activations: it decides the last bits of states
    kv_dtype: Dtype
    layers: tuple[LayerSpec, ...] = field(repr=False)
    draft: DraftModel | None = None
    adapters: Mapping[str, str] = field(default_factory=dict, hash=False)  # fingerprint with each LoRA adapter, by name

    def fingerprint_with(self, adapter: str) -> str:
        return self.adapters[adapter] if adapter else self.fingerprint

    def adapter_of(self, fingerprint: str) -> str | None:
        """Return the adapter of state with that fingerprint, empty without one; None: of another model."""
        known = {self.fingerprint: "", **{mark: name for name, mark in self.adapters.items()}}
        return known.get(fingerprint)

    @property
    def whole_only(self) -> bool:
        """True if a slot is usable at its full length only."""
        return whole_only(self.layers)


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A prefix slot to write."""

    tokens: Sequence[int]
    created_s: float  # Unix time
    with_draft: bool = False  # the drafter's state is there too
    paged_out: PagedOut | None = None  # which pages were in host memory, with KV Flash


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """A header: in the file it is the JSON ``slot``, where offsets of tensors and ``data_start`` are 0.

    ``packed_tokens``: little-endian uint32.  ``draft_fingerprint``: of the drafter whose state it holds too, or empty.
    """

    fingerprint: str
    architecture: str
    model: str
    dtype: Dtype
    kv_dtype: Dtype
    packed_tokens: bytes = field(repr=False)
    created_s: float
    tensors: tuple[TransferTensor, ...] = field(repr=False)
    checksums: dict[str, str] = field(repr=False)  # tensor name -> xxh3_64, 16 hex digits
    data_start: int
    draft_fingerprint: str = ""
    paged_out: PagedOut | None = field(default=None, repr=False)
    page_tokens: int = PAGE_TOKENS

    @property
    def n_tokens(self) -> int:
        return len(self.packed_tokens) // TOKEN_BYTES

    @property
    def tokens(self) -> TokenBuffer:
        return TokenBuffer.from_packed(self.packed_tokens)

    @property
    def file_bytes(self) -> int:
        return self.data_start + sum(t.n_bytes for t in self.tensors)


def whole_only(layers: Sequence[LayerSpec]) -> bool:
    """Return whether a recurrent state or window belongs to one position, so that a slot cannot be cut."""
    return any(layer.kv_group is not KvGroup.FULL for layer in layers)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian uint32.  Raises ValueError for one of more than 32 bits."""
    try:
        return TokenBuffer.of(tokens).packed()
    except OverflowError as error:
        raise ValueError(f"a token id is not in 0 to 4294967295: {error}") from error


# ---- the header


def lay_out(model: StateModel, slot: SlotRecord) -> SnapshotHeader:
    """Lay out the file of a slot, without checksums yet.  Raises ValueError without tokens."""
    n = len(slot.tokens)
    if not 0 < n <= MAX_TOKENS:
        raise ValueError(f"a snapshot of {n} tokens; give 1 to {MAX_TOKENS}")
    draft = model.draft if slot.with_draft else None
    tensors = slot_tensors(model.layers, n, model.kv_dtype, draft.layers if draft is not None else ())
    adapter = TokenBuffer.of(slot.tokens).adapter
    return _placed(
        SnapshotHeader(
            fingerprint=model.fingerprint_with(adapter),
            architecture=model.architecture,
            model=f"{model.name} with {adapter}" if adapter else model.name,
            dtype=model.dtype,
            kv_dtype=model.kv_dtype,
            packed_tokens=pack_tokens(slot.tokens),
            created_s=float(slot.created_s),
            tensors=tuple(tensors),
            checksums={t.name: "0" * 16 for t in tensors},
            data_start=0,
            draft_fingerprint=draft.fingerprint if draft is not None else "",
            paged_out=slot.paged_out,
        )
    )


def max_file_bytes(model: StateModel, n_tokens: int) -> int:
    """Return the most bytes of a slot's file, the header with 1 KiB a tensor and 7 bytes a token."""
    draft_layers = model.draft.layers if model.draft is not None else ()
    tensors = slot_tensors(model.layers, n_tokens, model.kv_dtype, draft_layers)
    header_bytes = 2 * DATA_ALIGNMENT + 1024 * len(tensors) + 7 * n_tokens
    return header_bytes + sum(tensor.n_bytes for tensor in tensors)


def _placed(snapshot: SnapshotHeader, data_start: int | None = None) -> SnapshotHeader:
    """Return the header with its tensors one after the other, from ``data_start`` or as early as they can be."""
    if data_start is None:
        data_start = -(-(LENGTH_BYTES + len(_json(snapshot))) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    return replace(snapshot, tensors=tuple(with_offsets(snapshot.tensors, data_start)), data_start=data_start)


def pack(snapshot: SnapshotHeader) -> bytes:
    """Return the first ``data_start`` bytes of the file: length, JSON, padding."""
    text = _json(snapshot).ljust(snapshot.data_start - LENGTH_BYTES)
    if LENGTH_BYTES + len(text) != snapshot.data_start:
        raise ValueError(f"the header takes {LENGTH_BYTES + len(text)} bytes instead of {snapshot.data_start}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _json(snapshot: SnapshotHeader) -> bytes:
    tensors = tuple(msgspec.structs.replace(t, offset=0) for t in snapshot.tensors)
    slot = msgspec.json.encode(replace(snapshot, tensors=tensors, data_start=0))
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "slot_check": sha256(slot).hexdigest(),
        "slot": slot.decode("utf-8"),
    }
    rows: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for t in snapshot.tensors:
        rows[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (at, at + t.n_bytes)}
        at += t.n_bytes
    return msgspec.json.encode(rows)


def header_bytes(length: bytes, file_bytes: int) -> int:
    """Return how many bytes :func:`parse` needs, from the first 8 of a file.  Raises SnapshotError."""
    n = int.from_bytes(length, "little")
    if len(length) < LENGTH_BYTES or LENGTH_BYTES + n > file_bytes:
        raise SnapshotError(Fault.TRUNCATED, "header length", f"{n} bytes, the file has {file_bytes}")
    if n > MAX_HEADER_BYTES:
        raise SnapshotError(Fault.DAMAGED, "header length", f"{n} bytes is not the length of a header")
    return LENGTH_BYTES + n


def parse(header: bytes, file_bytes: int) -> SnapshotHeader:
    """Parse as many bytes as :func:`header_bytes` returned.  Raises SnapshotError."""
    try:
        rows = msgspec.json.decode(header[LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(rows.get("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
    except (ValueError, RecursionError) as error:
        raise SnapshotError(Fault.FOREIGN, "header", f"is not that of a safetensors file: {error}") from error
    _check_version(metadata)
    text = metadata.get("slot", "")
    if sha256(text.encode()).hexdigest() != metadata.get("slot_check"):
        raise SnapshotError(Fault.DAMAGED, "slot", "does not match its checksum")
    try:
        slot = msgspec.json.decode(text, type=SnapshotHeader)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(Fault.FOREIGN, "slot", f"is not a record of a slot: {error}") from error
    if slot.page_tokens != PAGE_TOKENS:
        raise SnapshotError(Fault.MISFIT, "page_tokens", f"is {slot.page_tokens}, ours is {PAGE_TOKENS}")
    if not 0 < len(slot.packed_tokens) <= TOKEN_BYTES * MAX_TOKENS or len(slot.packed_tokens) % TOKEN_BYTES:
        raise SnapshotError(Fault.FOREIGN, "tokens", f"take {len(slot.packed_tokens)} bytes")
    if any(t.dtype not in ITEM_BYTES or t.n_bytes != tensor_bytes(t.dtype, t.shape) for t in slot.tensors):
        raise SnapshotError(Fault.FOREIGN, "tensors", "do not have the bytes of their shape")
    if any(min(t.shape, default=0) < 0 for t in slot.tensors) or {t.name for t in slot.tensors} != set(slot.checksums):
        raise SnapshotError(Fault.FOREIGN, "checksums", "do not name the file's tensors")
    snapshot = _placed(slot, len(header))
    if file_bytes != snapshot.file_bytes:
        fault = Fault.TRUNCATED if file_bytes < snapshot.file_bytes else Fault.DAMAGED
        raise SnapshotError(fault, "file length", f"{file_bytes} bytes, the header says {snapshot.file_bytes}")
    n_bytes = len(header) - LENGTH_BYTES
    if n_bytes.to_bytes(LENGTH_BYTES, "little") + _json(snapshot).ljust(n_bytes) != header:
        raise SnapshotError(Fault.DAMAGED, "header", "differs from what its slot says")
    return snapshot


def _check_version(metadata: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise SnapshotError(Fault.FOREIGN, "format", f"is {metadata.get('format', '')[:40]!r}, not {FORMAT!r}")
    text = metadata.get("format_version", "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise SnapshotError(Fault.FOREIGN, "format_version", f"is {text[:40]!r}")
    if int(text) < FORMAT_VERSION:
        reason = f"is {text}: made by an earlier version of lucevisor, this one reads {FORMAT_VERSION}"
        raise SnapshotError(Fault.OLDER, "format_version", reason)
    if int(text) > FORMAT_VERSION:
        raise SnapshotError(Fault.NEWER, "format_version", f"is {text}, this lucevisor reads {FORMAT_VERSION}")


# ---- compatibility


def check_fits(snapshot: SnapshotHeader, model: StateModel) -> None:
    """Raise SnapshotError unless the file holds the state of this model's layers, in whatever kv dtype."""
    if model.adapter_of(snapshot.fingerprint) is None:
        raise SnapshotError(
            Fault.OTHER_MODEL,
            "model_fingerprint",
            f"is that of {snapshot.model!r} ({snapshot.fingerprint[:16]}), running is {model.name!r} "
            f"({model.fingerprint[:16]})",
        )
    n, kv_dtype = snapshot.n_tokens, snapshot.kv_dtype
    with_draft = model.draft is not None and holds_draft(snapshot, model, n)
    draft_layers = model.draft.layers if model.draft is not None and with_draft else ()
    held = [tensor for tensor in snapshot.tensors if with_draft or not tensor.draft]
    _check_tensors(held, slot_tensors(model.layers, n, kv_dtype, draft_layers))


def holds_draft(snapshot: SnapshotHeader, model: StateModel, n_tokens: int) -> bool:
    """Return whether the file holds the state of the drafter that runs, for its first ``n_tokens``."""
    if model.draft is None or snapshot.draft_fingerprint != model.draft.fingerprint:
        return False
    return n_tokens == snapshot.n_tokens or not whole_only(model.draft.layers)


def _check_tensors(tensors: Sequence[TransferTensor], expected: Sequence[TransferTensor]) -> None:
    wanted, held = ({t.name: t for t in of} for of in (expected, tensors))
    for name in wanted.keys() ^ held.keys():
        reason = "is missing" if name in wanted else "is not one of this model"
        raise SnapshotError(Fault.MISFIT, f"tensor {name}", reason)
    for name, tensor in held.items():
        if msgspec.structs.replace(tensor, offset=0) != wanted[name]:
            raise SnapshotError(
                Fault.MISFIT,
                f"tensor {name}",
                f"{tensor.dtype} {list(tensor.shape)} from position {tensor.first}, this model has "
                f"{wanted[name].dtype} {list(wanted[name].shape)} from {wanted[name].first}",
            )
