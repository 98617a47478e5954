"""Checks for ``lucevisor doctor`` (a layer on every device, the arenas), timings for the planner, and tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from daemons import device as devices
from daemons.models.stage import LoadedStage
from daemons.timing import time_span
from daemons.tuning import tune
from lucevisor.model.families import read_spec
from lucevisor.model.gguf_files import open_model
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.errors import ArenaError
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.messages import Check, Checked, CheckLine, Measure
from lucevisor.protocol.steps import OpenSequence, Operation, SamplingParams, SetPages, Slice, Step, ZeroState

N_TOKENS = 9
TOLERANCE = {Dtype.FLOAT32: 1e-4, Dtype.FLOAT16: 1e-2, Dtype.BFLOAT16: 4e-2}
"""Allowed root-mean-square error of one layer relative to its output, against float32 on the cpu."""


def run_check(order: Check, backend: Backend, fds: Sequence[int]) -> Checked:
    """Run every check; a failed check is a line, never an exception."""
    if not order.files:
        return Checked([])
    if order.measure is not None:
        return _measure(order, order.measure, backend)
    if order.tune is not None:
        return tune(order, order.tune, backend)
    lines = [_arena(fd, plan.boundary, order, i) for i, (fd, plan) in enumerate(zip(fds, order.arenas, strict=True))]
    spec = read_spec(open_model([Path(f) for f in order.files]))
    rows = torch.randn(N_TOKENS, spec.boundary_width, generator=torch.Generator().manual_seed(order.layer))
    reference, _ = _layer(spec, order, Backend.CPU, 0, Dtype.FLOAT32, rows)
    warnings: list[str] = []
    for device in devices.visible_devices(backend):
        line, slow = _device(spec, order, backend, device.index, rows, reference)
        lines.append(line)
        warnings += [one for one in slow if one not in warnings]
    return Checked(lines, warnings=warnings)


def _measure(order: Check, measure: Measure, backend: Backend) -> Checked:
    devices.set_threads(measure.threads)
    spec = read_spec(open_model([Path(f) for f in order.files]), measure.options)
    timings = []
    for span in measure.spans:
        try:
            timings.append(time_span(spec, order, measure, backend, span))
            devices.release_memory(devices.torch_device(backend, span.device))
        except Exception as e:  # any: the planner continues without speeds and reports why
            return Checked(
                [CheckLine(f"{backend}:{span.device} layers {span.layers}", False, f"{type(e).__name__}: {e}")]
            )
    return Checked([], timings)


def _arena(fd: int, boundary: int, order: Check, i: int) -> CheckLine:
    try:
        arena = Arena.attach(fd, order.arenas[i])
        region = arena.region(0)
        ok = bytes(region[:8]) == b"lucevisr"
        region[8:16] = bytes(region[:8])
        seen = "read" if ok else "NOT seen"
        detail = f"{order.arenas[i].region_bytes} bytes a region, mapped, the supervisor's bytes {seen}"
        arena.close()
        return CheckLine(f"arena {boundary}", ok, detail)
    except ArenaError as e:
        return CheckLine(f"arena {boundary}", False, str(e))


def _device(
    spec: ModelSpec, order: Check, backend: Backend, index: int, rows: Tensor, reference: Tensor
) -> tuple[CheckLine, list[str]]:
    """Return how the layer compares, and what makes it slow."""
    subject = f"{backend}:{index} layer {order.layer} {order.dtype}"
    try:
        got, warnings = _layer(spec, order, backend, index, order.dtype, rows)
    except Exception as e:  # any: the operator must see what torch raises on a broken device
        return CheckLine(subject, False, f"{type(e).__name__}: {e}"), []
    change = (reference - rows).square().mean().sqrt()
    error = float(((got - reference).square().mean().sqrt()) / change)
    limit = TOLERANCE[order.dtype]
    told = f"relative error {error:.1e} against float32 on the cpu, allowed {limit:.0e}"
    return CheckLine(subject, error <= limit, told), warnings


def with_sources(spec: ModelSpec, layer: int) -> LayerRange:
    """The layer, preceded by the layers whose pages it reads: mostly the layer alone."""
    start = layer
    while True:
        sources = [x.shares_with for x in spec.layers[start : layer + 1] if x.shares_with is not None]
        first = min([start, *sources])
        if first == start:
            return LayerRange(start, layer + 1)
        start = first


@torch.inference_mode()
def _layer(
    spec: ModelSpec, order: Check, backend: Backend, index: int, dtype: Dtype, rows: Tensor
) -> tuple[Tensor, list[str]]:
    layers = with_sources(spec, order.layer)
    plan = StagePlan(1, [ShardPlan(index, layers)], source=0, target=1, embedding=False, output=False)
    kv_dtype = dtype if dtype in (Dtype.FLOAT32, Dtype.FLOAT16) else Dtype.BFLOAT16
    load = Load(order.files, dtype, kv_dtype, [plan], [], PoolSizes(1, 1, 1), 1, N_TOKENS)
    stage = LoadedStage.load(spec, plan, load, backend, lambda _: None)
    operations: list[Operation] = [
        ZeroState(0),
        OpenSequence(0, 0, SamplingParams()),
        SetPages(0, KvGroup.FULL, 0, [0]),
        SetPages(0, KvGroup.WINDOW, 0, [0]),
    ]
    step = Step(0, 0, operations, [Slice(0, 0, [0] * N_TOKENS, False)])
    stage.apply([o for o in operations if not isinstance(o, SetPages) or o.kv_group in spec.kv_groups()])
    out = stage.forward(step, rows.to(devices.torch_dtype(dtype)))
    return out.rows.float().cpu(), stage.warnings
