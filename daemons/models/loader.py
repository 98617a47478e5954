"""Load the weights of one shard from its files to its device, in the layouts of ``lucevisor.model.weight_layout``.

Reads with pread into a small staging buffer and converts batch by batch, so the host holds one batch at a time; the
page cache keeps the file for the next start.  Tensor names are only keys here.
Invariant: when a shard is built, ``n_bytes`` equals the planner's ``weight_bytes``, minus padding: of matrices that
share their last tile, of all where the device has no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from math import lcm, prod

import torch
from torch import Tensor

from daemons import parking
from daemons.device import allocating, memory_free
from daemons.models.lora import LoraWeights
from daemons.ops.cpu.library import Tiles
from daemons.ops.experts import ConcatExperts, ExpertWeights
from daemons.ops.linear import ConcatLinear, Linear, Table
from daemons.ops.selection import KernelSelector
from daemons.weights.dequant import four_bit, iq1_m_scale
from daemons.weights.numbers import decode, not_finite
from daemons.weights.packed import PackedWeights, empty_packed
from daemons.weights.reading import HostMemory, ProgressMeter, StagingBuffers, TensorChunk, row_count
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.lora_files import EMBEDDING
from lucevisor.model.quant_types import (
    CPU_TILE_ROWS,
    DENSE,
    INT4_GROUP,
    NATIVE,
    TILE_ROWS,
    GgmlType,
    WeightFormat,
    format_bytes,
)
from lucevisor.model.weight_layout import QUANTISED_FORMATS, ROW_INDEXED, TensorLayout, TensorRole

HALVES: dict[str, tuple[int, ...]] = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Where the float16 numbers of a block lie: its scale, and its minimum."""
UNTILED = ROW_INDEXED - {WeightFormat.BFLOAT16, WeightFormat.BLOCKS}
"""Formats of matrices that no cpu with C++ kernels has in tiles."""
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def checks_blocks(kind: GgmlType) -> bool:
    """Return whether ``any_invalid`` covers a type; the numbers of others are looked at when they are dequantised."""
    return kind.name in HALVES or kind.name in _DENSE or kind.name in ("MXFP4", "IQ1_M")


def any_invalid(kind: GgmlType, raw: Tensor) -> Tensor:
    """Return whether rows ``raw`` [rows, row_bytes] uint8 have a number that is NaN or infinite: bool [], on the same
    device.
    """
    if kind.name in _DENSE:
        return any_not_finite(raw.view(_DENSE[kind.name]))
    blocks = raw.view(-1, kind.block_bytes)
    if kind.name == "MXFP4":
        return (blocks[:, 0] == 255).any()  # NaN of e8m0
    if kind.name == "IQ1_M":
        return any_not_finite(iq1_m_scale(blocks))
    found = [((blocks[:, at + 1] & 0x7C) == 0x7C).any() for at in HALVES[kind.name]]
    return torch.stack(found).any()


def any_not_finite(numbers: Tensor) -> Tensor:
    """Return whether any of the numbers is NaN or infinite: bool []."""
    return ~numbers.isfinite().all()


BATCH_BYTES = 8 << 20
"""Bytes read and converted at a time, to fit a cpu's caches."""
DEVICE_BATCHES, ROOMY_BATCHES = 4, 8
"""An accelerator takes so many times as much at once, and more where ROOM_BYTES are free: beside a replay each launch
waits for multiprocessors.  A batch of packed weights is one launch, two where its parts are joined, and takes twice its
bytes.
"""
ROOM_BYTES = 4 << 30
ADVICE = "give this device fewer layers (target_layer_split), a smaller quant, or fewer pages"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a matrix as concatenated half-open ranges.  None: all rows in order.

    ``columns``: the range of columns to keep.  None: all.  ``pairs``: see :func:`halves_of_pairs`; ranges are of whole
    heads.
    """

    name: str
    ranges: tuple[tuple[int, int], ...] | None = None
    columns: tuple[int, int] | None = None
    pairs: tuple[int, int] | None = None


@dataclass(slots=True)
class WeightLoader:
    """Builds the callables and vectors of one shard.  Call ``finish`` when the shard is built, then close it."""

    files: GgufFiles
    layouts: Sequence[TensorLayout]
    selector: KernelSelector
    report: Callable[[int, int], None]
    lora: LoraWeights | None = None
    n_bytes: int = 0
    converted: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # type -> bytes in the file, bytes on the device
    tables: dict[str, Table] = field(default_factory=dict)  # those built
    staging: StagingBuffers = field(init=False)
    progress: ProgressMeter = field(init=False)
    _layouts: dict[tuple[str, TensorRole], TensorLayout] = field(init=False)
    _shared: dict[str, tuple[GgmlType, Tensor | PackedWeights]] = field(init=False)
    _host: HostMemory | None = field(init=False)
    _free: int = field(init=False)  # bytes before the load: to ask torch for each batch takes longer than to read it
    _invalid: dict[str, list[Tensor]] = field(default_factory=dict)  # findings that are on the device, by tensor

    def __post_init__(self) -> None:
        self._layouts = {(r.name, r.role): r for r in self.layouts}
        self._shared = {}
        self.staging = StagingBuffers(self.files, self.selector.device)
        on_cpu = self.selector.device.type == "cpu"
        self._free = memory_free(self.selector.device)
        self._host = HostMemory.reserve(sum(r.n_bytes + 256 for r in self.layouts)) if on_cpu else None
        self.progress = ProgressMeter(sum(r.read_bytes for r in self.layouts), self.report)

    def close(self) -> None:
        self.staging.close()

    def finish(self) -> None:
        """Wait for kernels that still compile.

        Raises LoadError naming a tensor with NaN or infinite numbers; a cpu's raises when it is read.
        """
        found, self._invalid = self._invalid, {}
        flags = torch.stack([torch.stack(flags).any() for flags in found.values()]).tolist() if found else []
        for name, invalid in zip(found, flags, strict=True):
            if invalid:
                raise not_finite(self.files, self.files.tensors[name])
        self.selector.finish()

    def _check(self, chunk: TensorChunk, flag: Tensor) -> None:
        if self.staging.accelerated:
            self._invalid.setdefault(chunk.tensor.name, []).append(flag)
        elif flag:
            raise not_finite(self.files, chunk.tensor)

    # ---- the interface of blocks

    def exact(self, name: str) -> Tensor:
        """A vector, or a small matrix that is always used in float32, in its own shape."""
        layout = self._layouts[name, TensorRole.EXACT]
        return self._dense([Rows(name)], torch.float32).view(layout.shape)

    def linear(self, *wanted: str | Rows) -> Linear:
        """The product with these matrices, stacked; neighbours of one format become one matrix.

        A name means the whole tensor, or the shard's part of it.
        """
        rows = [_shard_part(self._layouts[w, TensorRole.MATRIX]) if isinstance(w, str) else w for w in wanted]
        groups: list[list[Rows]] = []
        for r in rows:
            if groups and self._mergeable(groups[-1][-1], r):
                groups[-1].append(r)
            else:
                groups.append([r])
        parts = [self._matrix(group) for group in groups]
        linear = parts[0] if len(parts) == 1 else ConcatLinear(parts)
        if self.lora is None:
            return linear
        stacked = [(r.name, _total(self._tensor_chunks([r])), partial(_rows_of, r)) for r in rows]
        return self.lora.linear(linear, stacked)

    def experts(self, *names: str) -> ExpertWeights:
        """Matrices of experts, tensors ``[X, N, K]``; each expert's rows of all ``names`` are stacked."""
        layouts = [self._layout(Rows(name)) for name in names]
        if not all(self._mergeable(Rows(names[0]), Rows(name)) for name in names[1:]):
            return ConcatExperts([self.experts(name) for name in names])
        n_experts, n_columns = layouts[0].shape[0], layouts[0].shape[-1]
        rows = [Rows(r.name, ((e * r.shape[1], (e + 1) * r.shape[1]),)) for e in range(n_experts) for r in layouts]
        kinds = {r.kind.name for r in layouts}
        if all(map(self._tiled_experts, layouts)):
            if len(kinds) > 1:
                return ConcatExperts([self.experts(name) for name in names])
            return self.selector.expert_tiles(self._tiles(rows), n_experts, n_columns)
        if layouts[0].format in QUANTISED_FORMATS:
            if self.selector.repacks(layouts[0].format):
                return self.selector.packed_experts(self._packed(rows, n_experts), n_columns)
            raw = self._raw(rows)
            return self.selector.expert_blocks(layouts[0].kind, raw.view(n_experts, -1, raw.shape[-1]), n_columns)
        if layouts[0].format is WeightFormat.INT4:
            packed, affine = self._int4(rows)
            affine = affine.view(affine.shape[0], n_experts, -1, 2).transpose(0, 1).contiguous()
            return self.selector.expert_int4(kinds, packed.view(n_experts, -1, n_columns // 2), affine)
        if layouts[0].format is WeightFormat.INT8:
            weight, scale = self._int8(rows)
            return self.selector.expert_int8(kinds, weight.view(n_experts, -1, n_columns), scale.view(n_experts, -1))
        weight = self._dense(rows, self._dtype_of(layouts[0]))
        return self.selector.expert_dense(kinds, weight.view(n_experts, -1, n_columns))

    def table(self, name: str) -> Table:
        """A lookup table.  If it is the output matrix too, both share one tensor where the layouts say so."""
        lookup = self._layouts.get((name, TensorRole.LOOKUP))
        shared = lookup is None
        layout = self._layouts[name, TensorRole.MATRIX] if lookup is None else lookup
        weight: Tensor | PackedWeights
        if self.selector.repacks(layout.format):
            weight = self._packed([_shard_part(layout)])
        elif layout.format in QUANTISED_FORMATS:
            weight = self._raw([_shard_part(layout)])
        else:
            weight = self._dense([_shard_part(layout)], self._dtype_of(layout))
        if shared:
            self._shared[name] = (layout.kind, weight)
        table = self.tables[name] = self.selector.table(layout.kind, weight, layout.shape[-1])
        return table if self.lora is None or name != EMBEDDING else self.lora.table(table)

    # ---- layouts

    def _layout(self, rows: Rows) -> TensorLayout:
        return self._layouts[rows.name, TensorRole.MATRIX]

    def _mergeable(self, a: Rows, b: Rows) -> bool:
        fa, fb = self._layout(a), self._layout(b)
        if self._tiled(a) or self._tiled(b):
            return self._tiled(a) and self._tiled(b)
        return fa.format is fb.format and (fa.format not in QUANTISED_FORMATS or fa.kind is fb.kind)

    def _tiled(self, rows: Rows) -> bool:
        """Return whether C++ kernels multiply the matrix in tiles."""
        layout = self._layout(rows)
        if len(layout.shape) != 2 or rows.columns is not None or layout.format in UNTILED:
            return False
        return self.selector.tiles(layout.kind, *layout.shape, layout.n_bytes)

    def _tiled_experts(self, layout: TensorLayout) -> bool:
        """Return whether C++ kernels multiply experts in tiles; each expert begins with a tile."""
        if layout.format in UNTILED or layout.shape[1] % CPU_TILE_ROWS:
            return False
        return self.selector.tiles(layout.kind, layout.shape[0] * layout.shape[1], layout.shape[2], layout.n_bytes)

    def _dtype_of(self, layout: TensorLayout) -> torch.dtype:
        return torch.float32 if layout.format is WeightFormat.FLOAT32 else self.selector.dtype

    def _matrix(self, rows: list[Rows]) -> Linear:
        first = self._layout(rows[0])
        kinds = {self._layout(r).kind.name for r in rows}
        if rows[0].name in self._shared:
            kind, weight = self._shared[rows[0].name]
            if isinstance(weight, PackedWeights):
                return self.selector.packed_linear(weight, first.shape[-1])
            if first.format in QUANTISED_FORMATS:
                return self.selector.blocks(kind, weight, first.shape[-1])
            return self.selector.dense(kinds, weight, indexed=True)
        if self._tiled(rows[0]):
            by_kind = groupby(rows, lambda r: self._layout(r).kind)
            return self.selector.tiled_linear([self._tiles(list(same)) for _, same in by_kind], first.shape[-1])
        if first.format in QUANTISED_FORMATS:
            if self.selector.repacks(first.format):
                return self.selector.packed_linear(self._packed(rows), first.shape[-1])
            return self.selector.blocks(first.kind, self._raw(rows), first.shape[-1])
        if first.format is WeightFormat.INT4:
            return self.selector.int4(kinds, *self._int4(rows))
        if first.format is WeightFormat.INT8:
            return self.selector.int8(kinds, *self._int8(rows))
        return self.selector.dense(kinds, self._dense(rows, self._dtype_of(first)))

    def _raw(self, rows: list[Rows]) -> Tensor:
        chunks = self._tensor_chunks(rows)
        start, stop = chunks[0].byte_columns
        out = self._empty(chunks, (_total(chunks), stop - start), torch.uint8)
        for at, parts in self._batches(chunks, 1, expanded=False):
            for _, raw in parts:
                out[at : at + raw.shape[0]] = raw
                at += raw.shape[0]
        return out

    def _packed(self, rows: list[Rows], n_matrices: int | None = None) -> PackedWeights:
        """One matrix, or ``n_matrices`` of equally many rows."""
        chunks = self._tensor_chunks(rows)
        several = n_matrices or 1
        kind, n, columns = chunks[0].tensor.kind, _total(chunks) // several, chunks[0].width
        with self._allocating(chunks, format_bytes(kind, (several, n, columns), WeightFormat.PACKED)):
            out = self._empty_packed(kind, n, columns, n_matrices)
        self.n_bytes += out.nbytes
        for at, parts in self._batches(chunks, 1, expanded=False):
            # joined first: with many small experts in a batch, a launch for each would take longer than the work
            raw = [rows for _, rows in parts]
            self.selector.repack(out, at, raw[0] if len(raw) == 1 else torch.cat(raw))
        return out

    def _empty_packed(self, kind: GgmlType, n: int, columns: int, n_matrices: int | None) -> PackedWeights:
        shape = empty_packed(kind, n, columns, torch.device("meta"), n_matrices).tiles.shape
        tiles = parking.empty(shape, torch.uint8, self.selector.device)
        if n % TILE_ROWS:
            tiles[..., -1, :, :] = 0
        return PackedWeights(kind, tiles, n)

    def _tiles(self, rows: list[Rows]) -> Tiles:
        kernels, chunks = self.selector.cpu, self._tensor_chunks(rows)
        assert kernels is not None
        kind, n, columns = chunks[0].tensor.kind, _total(chunks), chunks[0].width
        data = self._empty(chunks, (kernels.tiles_bytes(kind, n, columns),), torch.uint8)
        for at, parts in self._batches(chunks, CPU_TILE_ROWS, expanded=False):
            kernels.pack(kind, torch.cat([raw for _, raw in parts]), data[kernels.tiles_bytes(kind, at, columns) :])
        return Tiles(kind, n, data)

    def _dense(self, rows: list[Rows], dtype: torch.dtype) -> Tensor:
        chunks = self._tensor_chunks(rows)
        out = self._empty(chunks, (_total(chunks), chunks[0].width), dtype)
        for at, parts in self._batches(chunks, 1):
            for chunk, raw in parts:
                out[at : at + raw.shape[0]] = self._numbers(chunk, raw, dtype)
                at += raw.shape[0]
        for chunk in chunks:
            kind = chunk.tensor.kind.name
            if kind not in DENSE and kind not in NATIVE:
                stored, kept = self.converted.get(kind, (0, 0))
                numbers = (chunk.stop - chunk.start) * chunk.width
                self.converted[kind] = (stored + chunk.n_bytes, kept + numbers * dtype.itemsize)
        return out

    def _int8(self, rows: list[Rows]) -> tuple[Tensor, Tensor]:
        chunks = self._tensor_chunks(rows)
        n, columns = _total(chunks), chunks[0].width
        weight = self._empty(chunks, (n, columns), torch.int8)
        scales = self._empty(chunks, (n,), torch.bfloat16)
        for at, parts in self._batches(chunks, 1):
            for chunk, raw in parts:
                x = self._numbers(chunk, raw, torch.float32)
                scale = (x.abs().amax(dim=1) / 127).to(torch.bfloat16)
                divisor = torch.where(scale > 0, scale.float(), 1.0).unsqueeze(1)
                weight[at : at + x.shape[0]] = (x / divisor).round_().clamp_(-127, 127).to(torch.int8)
                scales[at : at + x.shape[0]] = scale
                at += x.shape[0]
        return weight, scales

    def _int4(self, rows: list[Rows]) -> tuple[Tensor, Tensor]:
        chunks = self._tensor_chunks(rows)
        n, columns = _total(chunks), chunks[0].width
        packed = self._empty(chunks, (n, columns // 2), torch.uint8)
        affine = self._empty(chunks, (columns // INT4_GROUP, n, 2), torch.bfloat16)
        for at, parts in self._batches(chunks, 64):  # torch packs int4 in independent blocks of up to 64 rows
            codes, scales, zeros = (
                torch.cat(x) for x in zip(*(four_bit(p.tensor.kind, raw) for p, raw in parts), strict=True)
            )
            stop = at + codes.shape[0]
            packed[at:stop] = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
            affine[:, at:stop, 0] = scales.t()
            affine[:, at:stop, 1] = zeros.t()
        return packed, affine

    # ---- reading

    def _numbers(self, chunk: TensorChunk, raw: Tensor, dtype: torch.dtype) -> Tensor:
        found = decode(self.files, chunk.tensor, raw, dtype)
        if not checks_blocks(chunk.tensor.kind):
            self._check(chunk, any_not_finite(found))
        return found if found.shape[1] == chunk.width else found.narrow(1, _leading(chunk), chunk.width)

    def _tensor_chunks(self, rows: list[Rows]) -> list[TensorChunk]:
        out: list[TensorChunk] = []
        for r in rows:
            tensor = self.files.tensors[r.name]
            columns = r.columns or (0, tensor.shape[-1])
            out += [TensorChunk(tensor, a, b, columns, r.pairs) for a, b in r.ranges or ((0, row_count(tensor)),)]
        return out

    def _empty(self, chunks: list[TensorChunk], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self._allocating(chunks, prod(shape) * dtype.itemsize):
            room = self._host.take(shape, dtype) if self._host is not None and not self.selector.packs(dtype) else None
            out = parking.empty(shape, dtype, self.selector.device) if room is None else room
        self.n_bytes += out.nbytes
        return out

    def _allocating(self, chunks: list[TensorChunk], n_bytes: int) -> AbstractContextManager[None]:
        names = ", ".join(dict.fromkeys(p.tensor.name for p in chunks))
        what = f"weights of {names} ({self.files.paths[chunks[0].tensor.part].name})"
        return allocating(self.selector.device, what, n_bytes, ADVICE)

    def _batches(
        self, chunks: list[TensorChunk], align: int, *, expanded: bool = True
    ) -> Iterator[tuple[int, list[tuple[TensorChunk, Tensor]]]]:
        """The rows in batches of about BATCH_BYTES (as float32 if ``expanded``), in multiples of ``align`` rows and of
        heads whose rows are reordered."""
        align = lcm(align, *(p.pairs[0] for p in chunks if p.pairs is not None))
        row_bytes = max(p.tensor.n_bytes // row_count(p.tensor) for p in chunks)
        widest = max(row_bytes, chunks[0].width * 4) if expanded else row_bytes
        budget = BATCH_BYTES * self._n_batches()
        size = max(align, budget // widest // align * align)
        borders = [*range(0, _total(chunks), size), _total(chunks)]
        for start, stop in pairwise(borders):
            part = list(_split_rows(chunks, start, stop))
            read = self.staging.load(part)
            for chunk, raw in zip(part, read, strict=True):
                if checks_blocks(chunk.tensor.kind):
                    self._check(chunk, any_invalid(chunk.tensor.kind, raw))
            yield start, [(p, _ordered(p, _narrow(p, raw))) for p, raw in zip(part, read, strict=True)]
            self.progress.add(sum(p.n_bytes for p in part))

    def _n_batches(self) -> int:
        if not self.staging.accelerated:
            return 1
        return ROOMY_BATCHES if self._free - self.n_bytes >= ROOM_BYTES else DEVICE_BATCHES


def _total(chunks: list[TensorChunk]) -> int:
    return sum(p.stop - p.start for p in chunks)


def _shard_part(layout: TensorLayout) -> Rows:
    """The shard's rows or columns of a tensor."""
    part = layout.part
    if part is None:
        return Rows(layout.name)
    span = (part.start, part.stop)
    return Rows(layout.name, (span,)) if part.axis == 0 else Rows(layout.name, columns=span)


def _rows_of(rows: Rows, matrix: Tensor) -> Tensor:
    """Rows of a matrix [N, R] in the order in which blocks expect those of the tensor."""
    kept = matrix if rows.ranges is None else torch.cat([matrix[start:stop] for start, stop in rows.ranges])
    return kept if rows.pairs is None else halves_of_pairs(kept, *rows.pairs)


def _narrow(chunk: TensorChunk, raw: Tensor) -> Tensor:
    """The quant blocks that hold the chunk's columns."""
    start, stop = chunk.byte_columns
    return raw if stop - start == raw.shape[1] else raw[:, start:stop].contiguous()


def _ordered(chunk: TensorChunk, raw: Tensor) -> Tensor:
    """The rows in the order that blocks expect."""
    return raw if chunk.pairs is None else halves_of_pairs(raw, *chunk.pairs)


def halves_of_pairs(rows: Tensor, head_dim: int, n_rotary: int) -> Tensor:
    """Rows [n, W] of heads in whose first ``n_rotary`` rows those of a rotary pair alternate: all first ones of the
    pairs, then all second ones.
    """
    heads = rows.view(-1, head_dim, rows.shape[1])
    firsts, seconds = heads[:, :n_rotary:2], heads[:, 1:n_rotary:2]
    return torch.cat((firsts, seconds, heads[:, n_rotary:]), dim=1).flatten(0, 1)


def _leading(chunk: TensorChunk) -> int:
    """Numbers of the first block that precede the chunk's columns."""
    return chunk.columns[0] % chunk.tensor.kind.block_elements


def _split_rows(chunks: list[TensorChunk], start: int, stop: int) -> Iterator[TensorChunk]:
    """The chunks that rows start .. stop of the concatenation consist of."""
    at = 0
    for p in chunks:
        n = p.stop - p.start
        low, high = max(start, at), min(stop, at + n)
        if low < high:
            yield replace(p, start=p.start + low - at, stop=p.start + high - at)
        at += n
