"""Measures up to how many rows each kernel is the fastest, with matrices of the model, and keeps it for later loads.

For ``lucevisor bench --tune``.  Each limit lies between two implementations of the same product: the first is kept up
to the largest candidate at which it is no slower than the second.  Invariant: nothing is kept of a device of which
something could not be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from daemons import device as devices
from daemons.models.loader import WeightLoader
from daemons.ops.code_cache import cache_directory
from daemons.ops.cpu.linear import TiledLinear
from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.kernel_thresholds import CANDIDATES, NO_DIRECTORY, KernelThreshold, KernelThresholds, conditions, write
from daemons.ops.selection import KernelSelector
from daemons.timing import Captured, seconds
from lucevisor.model.families import read_spec
from lucevisor.model.gguf_files import open_model
from lucevisor.model.quant_types import DENSE
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.model.weight_layout import TensorLayout, TensorRole, shard_layouts
from lucevisor.protocol.messages import Check, Checked, CheckLine, Tune

N_TURNS = 3
"""Measurements of both, in turns; the fastest counts, since other load only slows one down."""
HALF = (Dtype.BFLOAT16, Dtype.FLOAT16)

Work = Callable[[Tensor], object]


def tune(order: Check, tune: Tune, backend: Backend) -> Checked:
    """Tune every device for the half precisions that it multiplies natively; a line for each limit or failure."""
    if cache_directory() is None:
        return Checked([CheckLine(f"{backend}", False, NO_DIRECTORY)])
    devices.prepare(backend, tune.threads)
    spec = read_spec(open_model([Path(f) for f in order.files]), tune.options)
    lines: list[CheckLine] = []
    for info in (d for d in devices.visible_devices(backend) if d.index in tune.devices):
        for dtype in (d for d in HALF if d in info.dtypes):
            subject = f"{backend}:{info.index} {dtype}"
            try:
                lines += _tune_device(spec, backend, devices.torch_device(backend, info.index), dtype, subject)
            except Exception as error:  # any: the operator must see what a broken device raises
                lines.append(CheckLine(subject, False, f"{type(error).__name__}: {error}"))
    return Checked(lines)


@torch.inference_mode()
def _tune_device(
    spec: ModelSpec, backend: Backend, device: torch.device, dtype: Dtype, subject: str
) -> list[CheckLine]:
    limits: dict[str, dict[KernelThreshold, int]] = {}
    lines, torch_dtype = [], devices.torch_dtype(dtype)
    for layout in _largest(spec, backend, dtype):
        selector = KernelSelector(device, torch_dtype, limits=KernelThresholds())
        kind = layout.kind.name
        with devices.launching(device):
            found = dict(_of_matrix(spec, layout, selector))
        if found:
            limits.setdefault(kind, {}).update(found)
        lines += [CheckLine(f"{subject} {kind}", True, f"{what} to {at}") for what, at in found.items()]
        devices.release_memory(device)
    if limits:
        write(conditions(device, torch_dtype), limits)
    return lines


def _largest(spec: ModelSpec, backend: Backend, dtype: Dtype) -> list[TensorLayout]:
    """The largest matrix of each quant type and the largest experts of each, without the vocabulary's."""
    layers = LayerRange(0, spec.n_layers)
    found: dict[tuple[str, int], TensorLayout] = {}
    for layout in shard_layouts(spec, layers, embedding=False, output=False, backend=backend, dtype=dtype):
        key = (layout.kind.name, len(layout.shape))
        if layout.role is not TensorRole.MATRIX or layout.kind.name in DENSE:
            continue
        if key not in found or layout.n_bytes > found[key].n_bytes:
            found[key] = layout
    return list(found.values())


def _of_matrix(
    spec: ModelSpec, layout: TensorLayout, selector: KernelSelector
) -> Iterator[tuple[KernelThreshold, int]]:
    """The limits between the kernels that this device has for the matrix."""
    weights = WeightLoader(spec.files, [layout], selector, lambda done, total: None)
    try:
        product = weights.linear(layout.name) if len(layout.shape) == 2 else weights.experts(layout.name)
        selector.finish()
    finally:
        weights.close()
    n_columns = layout.shape[-1]
    if isinstance(product, TiledLinear):
        if not product.kernels.many_by_onednn:
            return
        yield "tiled rows", _handover("tiled rows", selector, n_columns, _switch(product, "max_rows", product))
        return
    if not selector.kernels:
        return
    from daemons.ops.packed_linear import PackedExperts, PackedLinear

    if isinstance(product, PackedLinear):
        if product.row_gemv is not None:
            most, works = product.max_rows, _switch(product, "max_rows", product)
            product.gemv_rows = 1 << 30
            yield "cuda rows", min(most, _handover("cuda rows", selector, n_columns, works, most))
            product.max_rows = 0
        yield "triton rows", _handover("triton rows", selector, n_columns, _switch(product, "gemv_rows", product))
    elif isinstance(product, PackedExperts) and product.row_gemv is not None:
        ids = torch.arange(max(CANDIDATES["cuda pairs"]), device=selector.device) % product.n_experts

        def routed(x: Tensor) -> object:
            return product.grouped_gemm(x, ExpertPairs(ids[: len(x)], product.n_experts), 1)

        yield "cuda pairs", _handover("cuda pairs", selector, n_columns, _switch(product, "max_pairs", routed))


def _switch(product: object, limit: str, work: Work) -> tuple[Work, Work]:
    """The work with the first implementation and with the second, whatever rows there are."""

    def with_limit(value: int) -> Work:
        def run(x: Tensor) -> object:
            setattr(product, limit, value)
            return work(x)

        return run

    return with_limit(1 << 30), with_limit(-1)


def _handover(
    what: KernelThreshold, selector: KernelSelector, n_columns: int, works: tuple[Work, Work], most: int = 1 << 30
) -> int:
    """The largest candidate up to which the first work is no slower than the second."""
    kept = CANDIDATES[what][0]
    for n in (n for n in CANDIDATES[what] if 0 < n <= most):
        x = torch.randn(n, n_columns, generator=torch.Generator().manual_seed(n)).to(selector.device, selector.dtype)
        turns = [[_time(work, x, selector.device) for work in works] for _ in range(N_TURNS)]
        first, second = map(min, zip(*turns, strict=True))
        if first > 1.02 * second:  # two measurements of the same differ by as much
            break
        kept = n
    return kept


def _time(work: Work, x: Tensor, device: torch.device) -> float:
    def once(call: int) -> Tensor:
        work(x)
        return x

    return seconds(once if device.type == "cpu" else Captured(device, once), device)
