"""Kernel selection: which implementation an operation gets, decided once at load and reported.

The layout of a matrix is decided by ``lucevisor.model.weight_layout``, as the planner counts its bytes; this module
turns layout, device and dtype into a callable.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.device import launching
from daemons.errors import LoadError
from daemons.ops.cpu.compiler import CpuCompileError
from daemons.ops.cpu.library import KINDS, CpuKernels, Tiles, cpu_kernels
from daemons.ops.cpu.linear import ALL_ROWS, FEW_ROWS, CpuQuantTable, TiledLinear
from daemons.ops.experts import UNLIMITED_PAIRS, BlockExperts, DenseExperts, ExpertWeights, SeparateExperts
from daemons.ops.kernel_thresholds import KernelThresholds, conditions, read
from daemons.ops.linear import (
    Bfloat16CpuLinear,
    BlockLinear,
    DenseLinear,
    DenseTable,
    Float32CpuLinear,
    Int4CpuLinear,
    Int8CpuLinear,
    Linear,
    Product,
    QuantTable,
    Table,
)
from daemons.ops.operations import Operations, TorchOperations
from daemons.weights.packed import PackedWeights
from lucevisor.model.quant_types import GgmlType, WeightFormat

if TYPE_CHECKING:
    from daemons.ops.cuda.gemv import CudaGemv
    from daemons.ops.cuda.operations import CudaOperations
    from daemons.ops.packed_linear import PackedExperts, PackedLinear

DETERMINISTIC = "engine.deterministic"
_NOT_COMPILED: dict[tuple[object, ...], str] = {}
"""Device, dtype, quant type, chunks and dimensions of matrices for which CUDA C++ was not compiled, and why."""
_GEMV_FAILURES: dict[tuple[str, torch.dtype], str] = {}
"""Why no CUDA C++ was compiled for a device and dtype."""


@dataclass(slots=True)
class KernelSelector:
    """Builds the callables of one device and records what it selected, as ``operation -> implementation``.

    Call ``finish`` when they are built: CUDA C++ compiles meanwhile.

    ``kernels``: whether to use Triton kernels; None: on a GPU for which Triton can compile.  ``limits``: up to how many
    rows each kernel runs; None: as this kind of device was tuned, else as built in.  ``batch_invariant``: one kernel
    for any number of rows, whose result for a row has the same bits whatever rows are beside it.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: bool | None = None
    limits: KernelThresholds | None = None
    batch_invariant: bool = False
    selected: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    """What costs speed here and can be fixed."""
    operations: Operations = field(init=False)
    thresholds: KernelThresholds = field(init=False)
    _row_gemv: CudaGemv | None = field(init=False, default=None)
    cpu: CpuKernels | None = field(init=False, default=None)
    """C++ kernels of a cpu that computes in bfloat16."""
    max_async_pairs: int = UNLIMITED_PAIRS
    """(token, expert) pairs up to which none of the experts built here synchronises with the host."""
    waited_s: float = 0.0
    """In ``finish``."""
    _compiling: list[tuple[str, PackedLinear | PackedExperts]] = field(init=False, default_factory=list)
    """What ``finish`` has to look at, and what it is."""
    _cuda_operations: CudaOperations | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Raises LoadError for what ``batch_invariant`` needs and is not there."""
        if self.kernels is None:
            reason = triton_reject_reason(self.device, self.dtype) if self.device.type != "cpu" else "a cpu"
            self.kernels = not reason
            if reason and self.device.type != "cpu":
                self.warnings.append(f"{self.device} runs plain torch, many times slower than kernels: {reason}")
        if self.device.type == "cpu" and self.dtype == torch.bfloat16:
            try:
                self.cpu = cpu_kernels()
            except CpuCompileError as error:
                self.warnings.append(
                    f"the cpu computes with torch alone, several times slower than with C++ kernels: {error}"
                )
        if self.batch_invariant:
            self._check_batch_invariant()
        self.thresholds, ignored = self._tuned() if self.limits is None else (self.limits, "")
        self.warnings += [ignored] if ignored else []
        uses_cuda = self.device.type == "cuda" and torch.version.cuda and not self.batch_invariant
        if self.kernels and uses_cuda and self.dtype != torch.float32:
            self._row_gemv, reason = _cuda_gemv(self.device, self.dtype)
            if reason:
                self.warnings.append(f"{self.device} decodes with Triton kernels, slower than CUDA C++: {reason}")
        self.operations, name = self._layer_operations()
        self._note("layers", name)

    def _check_batch_invariant(self) -> None:
        if self.kernels:
            if torch.version.hip:
                self.warnings.append(
                    f"{DETERMINISTIC} was tested on NVIDIA GPUs, not on {self.device}: docs/numerics.md"
                )
            return
        if self.device.type != "cpu":
            why = f"{self.device} has no kernels: {'; '.join(self.warnings)}"
        elif self.dtype != torch.bfloat16:
            why = f"a cpu computes {_name(self.dtype)} with torch alone; set engine.dtype to bfloat16, or it to false"
        elif self.cpu is None:
            why = "; ".join(self.warnings)
        else:
            return
        raise LoadError(DETERMINISTIC, why, "set it to false", configuration=True)

    def _tuned(self) -> tuple[KernelThresholds, str]:
        """What ``bench --tune`` kept for this kind of device, and why a file of it was ignored."""
        if self.cpu is not None or (self.kernels and self.device.type == "cuda"):
            return read(conditions(self.device, self.dtype))
        return KernelThresholds(), ""

    def _layer_operations(self) -> tuple[Operations, str]:
        if self._row_gemv is not None and self._row_gemv.limits.clusters:
            from daemons.ops.cuda.operations import CudaOperations

            self._cuda_operations = CudaOperations(self.device, self.dtype, self._row_gemv.architecture)
            return self._cuda_operations, "triton, gated delta net of short slices cuda c++"
        if self.kernels and self.batch_invariant:
            from daemons.ops.triton_batch_invariant import BatchInvariantTritonOperations

            return BatchInvariantTritonOperations(), "triton, batch-invariant"
        if self.kernels:
            return _kernels(), "triton"
        if self.cpu is not None and self.batch_invariant:
            from daemons.ops.cpu.batch_invariant import BatchInvariantCpuOperations

            return BatchInvariantCpuOperations(self.cpu), "c++, batch-invariant"
        if self.cpu is not None:
            from daemons.ops.cpu.operations import CpuOperations

            return CpuOperations(self.cpu), "c++, attention of long slices torch"
        return TorchOperations(), "torch"

    @property
    def product(self) -> Product | None:
        """The product with plain matrices where one kernel must do for all numbers of rows."""
        if not self.batch_invariant:
            return None
        if self.kernels:
            from daemons.ops.triton.dense_gemm import dense_gemm

            return dense_gemm
        assert self.cpu is not None
        return self.cpu.multiply_dense

    @property
    def captures(self) -> bool:
        """Whether short steps are captured here (daemons/graphs.py)."""
        return self.cpu is not None if self.device.type == "cpu" else bool(self.kernels)

    def repacks(self, fmt: WeightFormat) -> bool:
        """Whether a matrix of that format is repacked here."""
        return fmt is WeightFormat.PACKED and bool(self.kernels)

    def repack(self, packed: PackedWeights, first: int, raw: Tensor) -> None:
        """``packed.write(first, raw)`` in one launch, for formats that :meth:`repacks`."""
        from daemons.ops.triton.repack import write_packed

        with launching(self.device):
            write_packed(packed, first, raw)

    def tiles(self, kind: GgmlType, n_rows: int, n_columns: int, n_bytes: int) -> bool:
        """Whether a matrix is repacked to tiles for C++ on a cpu: those take no more than the ``n_bytes`` planned."""
        if self.cpu is None or kind.name not in KINDS:
            return False
        return self.cpu.tiles_bytes(kind, n_rows, n_columns) <= n_bytes

    def _note(self, what: str, implementation: str) -> None:
        key = f"{self.device} {what}"
        before = self.selected.get(key, "")
        if implementation not in before.split(" + "):
            self.selected[key] = f"{before} + {implementation}" if before else implementation

    def packs(self, dtype: torch.dtype) -> bool:
        """Whether a plain matrix of ``dtype`` is packed into other memory than it was read to."""
        if self.batch_invariant:
            return False
        return self.device.type == "cpu" and dtype == torch.bfloat16 and has_packed_bfloat16()

    def dense(self, kinds: set[str], weight: Tensor, *, indexed: bool = False) -> Linear:
        """A plain matrix.  ``indexed``: it is also a lookup table, so its rows must stay where they are."""
        what = "linear " + ",".join(sorted(kinds))
        if self.batch_invariant:
            self._note(what, f"{_name(weight.dtype)} batch-invariant")
            return DenseLinear(weight, self.product or F.linear)
        if self.device.type == "cpu" and weight.dtype == torch.float32:
            self._note(what, "float32 batched mkl")
            return Float32CpuLinear(weight)
        if not indexed and self.packs(weight.dtype):
            self._note(what, "bfloat16 onednn packed")
            return Bfloat16CpuLinear(weight)
        self._note(what, f"{_name(weight.dtype)} torch")
        return DenseLinear(weight)

    def tiled_linear(self, parts: list[Tiles], n_columns: int) -> Linear:
        """Matrices in tiles, one below the other."""
        assert self.cpu is not None
        product = TiledLinear(self.cpu, parts, n_columns, min(map(self._max_tiled_rows, parts)))
        for kind in (part.kind.name for part in parts):
            self._note(f"linear {kind}", product.implementation + self.thresholds.note(kind))
        return product

    def _max_tiled_rows(self, tiles: Tiles) -> int:
        assert self.cpu is not None
        if not self.cpu.many_by_onednn or self.batch_invariant:
            return ALL_ROWS
        return self.thresholds.limit(tiles.kind.name, "tiled rows", FEW_ROWS)

    def expert_tiles(self, tiles: Tiles, n_experts: int, n_columns: int) -> ExpertWeights:
        """Matrices of experts in tiles, one below the other; each begins with a tile."""
        assert self.cpu is not None
        max_rows, n_rows = self._max_tiled_rows(tiles), tiles.n_rows // n_experts
        matrices = [Tiles(tiles.kind, n_rows, data) for data in tiles.data.view(n_experts, -1)]
        experts = [TiledLinear(self.cpu, [matrix], n_columns, max_rows) for matrix in matrices]
        self._note(f"experts {tiles.kind.name}", experts[0].implementation + self.thresholds.note(tiles.kind.name))
        return SeparateExperts([*experts], n_columns)

    def blocks(self, kind: GgmlType, raw: Tensor, n_columns: int) -> Linear:
        self._note(f"linear {kind.name}", f"blocks, dequantised to {_name(self.dtype)} at each call")
        return BlockLinear(kind, raw, n_columns, self.product or F.linear)

    def packed_linear(self, packed: PackedWeights, n_columns: int) -> Linear:
        """A packed matrix."""
        from daemons.ops.packed_linear import PackedLinear
        from daemons.ops.triton.gemv import MAX_GEMV_ROWS

        if self.batch_invariant:
            return self._batch_invariant_linear(packed, n_columns)
        kind, (row_gemv, n_rows) = packed.kind.name, self._row_gemv_of(packed)
        n_rows = min(n_rows, self.thresholds.limit(kind, "cuda rows", n_rows))
        gemv_rows = self.thresholds.limit(kind, "triton rows", MAX_GEMV_ROWS)
        product = PackedLinear(packed, n_columns, row_gemv, n_rows, gemv_rows)
        self._built("linear", product)
        return product

    def _batch_invariant_linear(self, packed: PackedWeights, n_columns: int) -> Linear:
        from daemons.ops.triton_batch_invariant import BatchInvariantPackedLinear

        self._note(f"linear {packed.kind.name}", BatchInvariantPackedLinear.implementation)
        return BatchInvariantPackedLinear(packed, n_columns)

    def packed_experts(self, packed: PackedWeights, n_columns: int) -> ExpertWeights:
        """Packed matrices of experts."""
        from daemons.ops.packed_linear import MAX_ROW_GEMV_PAIRS, PackedExperts

        kind = packed.kind.name
        if self.batch_invariant:
            from daemons.ops.triton_batch_invariant import BatchInvariantPackedExperts

            self._note(f"experts {kind}", BatchInvariantPackedExperts.implementation)
            return self._experts(BatchInvariantPackedExperts(packed, n_columns))
        n_pairs = self.thresholds.limit(kind, "cuda pairs", MAX_ROW_GEMV_PAIRS)
        experts = PackedExperts(packed, n_columns, self._row_gemv_of(packed)[0], n_pairs)
        self._built("experts", experts)
        return self._experts(experts)

    def _built(self, what: str, product: PackedLinear | PackedExperts) -> None:
        if product.row_gemv is not None:
            self._compiling.append((what, product))
        else:
            self._note_packed(what, product)

    def _note_packed(self, what: str, product: PackedLinear | PackedExperts) -> None:
        kind = product.packed.kind.name
        self._note(f"{what} {kind}", product.implementation + self.thresholds.note(kind))

    def _row_gemv_of(self, packed: PackedWeights) -> tuple[CudaGemv | None, int]:
        """The CUDA C++ kernels for this matrix, which compile from now on, and for how many rows there are some.

        None, and a warning, where they could not be compiled; that is not tried again for another matrix like it.
        """
        if self._row_gemv is None or self._not_compiled(packed):
            return None, 0
        n_rows = self._row_gemv.prepare(packed)
        return (self._row_gemv if n_rows else None), n_rows

    def _not_compiled(self, packed: PackedWeights) -> bool:
        """Whether there are no CUDA C++ kernels for this matrix since some could not be compiled; then also warns."""
        if not (reason := _NOT_COMPILED.get(self._key(packed))):
            return False
        kind = packed.kind.name
        warning = f"{self.device} multiplies {kind} with Triton kernels, slower than CUDA C++: {reason}"
        self.warnings += [warning] if warning not in self.warnings else []
        return True

    def _key(self, packed: PackedWeights) -> tuple[object, ...]:
        return (str(self.device), self.dtype, packed.kind.name, packed.n_chunks, packed.tiles.ndim)

    def finish(self) -> None:
        """Wait for kernels of the matrices built so far that still compile, load them, and note what was selected.

        Matrices for which CUDA C++ cannot be compiled are left to Triton, with a warning.  Raises CompileError or
        DriverError for kernels of a layer, which has no others.
        """
        began, built = time.monotonic(), self._compiling
        self._compiling = []
        for what, product in built:
            packed = product.packed
            assert self._row_gemv is not None
            if not self._not_compiled(packed) and (failed := _not_loaded(self._row_gemv, packed)):
                _NOT_COMPILED[self._key(packed)] = failed
            if self._not_compiled(packed):
                product.row_gemv = None
            self._note_packed(what, product)
        if self._cuda_operations is not None:
            self._cuda_operations.load()
        self.waited_s += time.monotonic() - began

    def _experts(self, matrices: ExpertWeights) -> ExpertWeights:
        self.max_async_pairs = min(self.max_async_pairs, matrices.max_async_pairs)
        return matrices

    def expert_dense(self, kinds: set[str], weight: Tensor) -> ExpertWeights:
        """Plain matrices of experts ``[X, N, K]``."""
        self._note("experts " + ",".join(sorted(kinds)), f"{_name(weight.dtype)} torch")
        return self._experts(DenseExperts(weight, self.product))

    def expert_blocks(self, kind: GgmlType, raw: Tensor, n_columns: int) -> ExpertWeights:
        """Quant blocks of experts ``[X, N, row_bytes]``."""
        self._note(f"experts {kind.name}", f"blocks, dequantised to {_name(self.dtype)} when selected")
        return self._experts(BlockExperts(kind, raw, n_columns, self.product))

    def expert_int4(self, kinds: set[str], packed: Tensor, affine: Tensor) -> ExpertWeights:
        """Packed int4 ``[X, N, K / 2]`` and its affine groups ``[X, K / 32, N, 2]``."""
        self._note("experts " + ",".join(sorted(kinds)), "int4 groups of 32, torch packed")
        pairs = zip(packed, affine, strict=True)
        return SeparateExperts([self._int4(kinds, p, a) for p, a in pairs], packed.shape[-1] * 2)

    def expert_int8(self, kinds: set[str], weight: Tensor, scale: Tensor) -> ExpertWeights:
        """int8 ``[X, N, K]`` with one scale a row ``[X, N]``."""
        self._note("experts " + ",".join(sorted(kinds)), f"int8 rows, {self._int8_form}")
        pairs = zip(weight, scale, strict=True)
        return SeparateExperts([self._int8(w, s) for w, s in pairs], weight.shape[-1])

    def int4(self, kinds: set[str], packed: Tensor, affine: Tensor) -> Linear:
        self._note("linear " + ",".join(sorted(kinds)), "int4 groups of 32, torch packed")
        return self._int4(kinds, packed, affine)

    def int8(self, kinds: set[str], weight: Tensor, scale: Tensor) -> Linear:
        self._note("linear " + ",".join(sorted(kinds)), f"int8 rows, {self._int8_form}")
        return self._int8(weight, scale)

    def _int4(self, kinds: set[str], packed: Tensor, affine: Tensor) -> Linear:
        if self.batch_invariant:
            why = f"matrices of {', '.join(sorted(kinds))} with so many rows have no kernel on a cpu"
            raise LoadError(DETERMINISTIC, why, "set it to false, or use another quant", configuration=True)
        return Int4CpuLinear(packed, affine)

    @property
    def _int8_form(self) -> str:
        return "batch-invariant" if self.batch_invariant else "torch packed"

    def _int8(self, weight: Tensor, scale: Tensor) -> Linear:
        if not self.batch_invariant:
            return Int8CpuLinear(weight, scale)
        from daemons.ops.cpu.batch_invariant import BatchInvariantInt8Linear

        assert self.cpu is not None
        return BatchInvariantInt8Linear(self.cpu, weight, scale)

    def table(self, kind: GgmlType, weight: Tensor | PackedWeights, n_columns: int) -> Table:
        """A lookup table: raw blocks are uint8."""
        if isinstance(weight, PackedWeights):
            from daemons.ops.packed_linear import PackedTable

            self._note(f"lookup {kind.name}", "packed, rows dequantised by triton")
            return PackedTable(weight, n_columns, self.dtype)
        if weight.dtype == torch.uint8 and self.cpu is not None and kind.name in KINDS:
            self._note(f"lookup {kind.name}", "blocks, rows dequantised by c++")
            return CpuQuantTable(self.cpu, kind, weight)
        if weight.dtype == torch.uint8:
            self._note(f"lookup {kind.name}", "blocks, rows dequantised after the lookup")
            return QuantTable(kind, weight, self.dtype)
        self._note(f"lookup {kind.name}", f"{_name(weight.dtype)} torch")
        return DenseTable(weight, self.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def triton_reject_reason(device: torch.device, dtype: torch.dtype) -> str:
    """Why Triton kernels cannot run on a GPU and how to fix it; empty if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed in its environment; install the one that belongs to this torch"
    try:
        from daemons.ops.packed_linear import smoke_test

        with launching(device):
            smoke_test(device, dtype)
    except Exception as error:  # no C compiler, unknown GPU, wrong library: all alike
        first = _first_line(error)
        return f"Triton cannot compile for it ({type(error).__name__}: {first}); it needs a C compiler and a driver"
    return ""


def _cuda_gemv(device: torch.device, dtype: torch.dtype) -> tuple[CudaGemv | None, str]:
    """The CUDA C++ kernel, or why it cannot run and how to fix it; neither on a GPU that is too old."""
    from daemons.ops.cuda.compiler import CompileError
    from daemons.ops.cuda.gemv import MIN_CAPABILITY, cuda_gemv

    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return None, ""
    if failed := _GEMV_FAILURES.get((str(device), dtype)):
        return None, failed
    try:
        with launching(device):
            return cuda_gemv(device, dtype), ""
    except Exception as error:  # no NVRTC, one older than the GPU, an old driver: all alike
        reason = f"{type(error).__name__}: {_first_line(error)}"
        if isinstance(error, CompileError):  # nothing that passes, as a lack of memory does
            _GEMV_FAILURES[str(device), dtype] = reason
        return None, reason


def _not_loaded(gemv: CudaGemv, packed: PackedWeights) -> str:
    """Load the kernels for a matrix, and return why that failed."""
    from daemons.ops.cuda.compiler import CompileError
    from daemons.ops.cuda.driver import DriverError

    try:
        gemv.load(packed)
    except (CompileError, DriverError) as error:
        return f"{type(error).__name__}: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _kernels() -> Operations:
    from daemons.ops.triton_operations import TritonOperations

    return TritonOperations()


def has_packed_bfloat16() -> bool:
    """Whether torch has oneDNN's packed bfloat16 product and the cpu supports it."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
