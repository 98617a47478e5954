"""Cost model: the bytes of a shard's weights, state and workspace (peak activation memory; vLLM's memory profiling).

Weights follow :mod:`lucevisor.model.weight_layout`, as the loader does, and state the specs' table, as the pools do, so
both are exact.  The workspace of a GPU is in :mod:`lucevisor.placement.gpu_workspace`; beside it KV Flash takes

    host pages   2 x HOST_CHUNK_PAGES x page of a layer of each shape             chunks
                 host pages x sketches of the keys of each layer               where pages are ranked
                 T x query heads x head dim x 4 x 4                            parts of the output that are merged

That of a cpu is an estimate of the peak during a step with plain torch operations; a layer frees its part before the
next one begins, so the largest layer counts:

    activations  T (4 E + sum of matrix rows of a layer) x 4 bytes             float32 copies of a layer's activations
    delta rule   T x rows of a state x RULE_COPIES x 4                         frames, decays, solved systems
                 B x states of a layer x 2                                     states gathered and written back
    attention    B x pages per sequence x page of a layer                      keys and values, padded to the longest
                 T x (query heads per kv head) x L x 5                         the mask, as flags and as numbers
    output       n_sequences x V x 28                                          logits, sorted values and ids, counts
    matrix       largest int8 matrix x 2                                       widened for GEMM

T tokens of a step, B sequences decoded together, L longest sequence, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from lucevisor.model.extents import extent_of
from lucevisor.model.lora_files import adapter_bytes
from lucevisor.model.pages import pages_of
from lucevisor.model.quant_types import WeightFormat
from lucevisor.model.spec import LayerSpec, ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange, dtype_bytes
from lucevisor.model.weight_layout import TensorLayout, TensorRole, layer_layouts, non_layer_layouts
from lucevisor.model.workspace import (
    GRAPH_LENGTH,
    GRAPH_ROWS,
    HOST_CHUNK_PAGES,
    INT8_GEMV_ROWS,
    SCORE_ELEMENTS,
)
from lucevisor.placement.devices import HOST
from lucevisor.placement.gpu_workspace import BLAS_BYTES, POOL_MARGIN, WEIGHTS_MARGIN, LayerWidths, sampling_bytes
from lucevisor.placement.result import Shard
from lucevisor.protocol.loading import PoolSizes

RULE_COPIES = 16
SCORE_BYTES = 3 * 4 * SCORE_ELEMENTS
"""Scores in float32, masked, and their softmax."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of steps and pools.  ``n_together``: sequences decoded in one step.  ``resident``: positions of a sequence
    in KV group full that are attended to at once.  ``sampled_rows``: whose logits exist at once."""

    max_tokens: int
    max_sequences: int
    max_context: int
    resident: int
    n_together: int
    pools: PoolSizes
    sampled_rows: int
    ranks_pages: bool = False


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one shard, on its device and in host memory."""

    weight_bytes: int
    state_bytes: int
    workspace_bytes: int
    host_state_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.workspace_bytes

    def bytes_in(self, memory: str, device_memory: str) -> int:
        """Bytes in ``memory``, for a device whose own memory is ``device_memory``."""
        on_device = self.total_bytes if memory == device_memory else 0
        return on_device + (self.host_state_bytes if memory == HOST else 0)


@dataclass(frozen=True, slots=True)
class _Weights:
    n_bytes: int
    stored_bytes: int  # of the same numbers in the file
    n_rows: int  # of all matrices and of the routed experts: outputs per token
    largest_int8: int  # elements of the largest int8 matrix; those of experts are widened one by one
    in_blocks: bool  # some matrix is, which torch dequantises step by step


@dataclass(frozen=True, slots=True)
class _Layer:
    """What the workspace of a layer depends on."""

    kv_group: KvGroup
    window: int
    n_rows: int  # of its matrices: outputs per token
    state_rows: int
    unit_bytes: int
    read_bytes: int  # of a page, as numbers that are computed with
    query_groups: int
    output_width: int
    in_blocks: bool
    widths: LayerWidths


@dataclass(frozen=True, slots=True)
class _Range:
    """Sums over the layers of a shard, with the embedding and the output if it has them."""

    weight_bytes: int
    stored_bytes: int
    largest_int8: int  # in layers
    end_int8: int  # in the embedding and the output
    layers: frozenset[_Layer]
    device_units: dict[KvGroup, int]  # bytes of a page or state on the device
    host_units: dict[KvGroup, int]
    draft_state_bytes: int
    sketch_bytes: int  # of a page in host memory
    page_bytes: int  # one layer of each shape
    n_attention: int  # layers of KV group full
    n_recurrent: int
    state_row_bytes: int  # of a recurrent layer's state, what lies in no extent


class CostModel:
    """The costs of a model's layers in one pair of dtypes."""

    def __init__(self, spec: ModelSpec, dtype: Dtype, kv_dtype: Dtype) -> None:
        """``spec.files`` must be set to count weights."""
        self.spec, self.dtype, self.kv_dtype = spec, dtype, kv_dtype
        self.extent = extent_of(spec, kv_dtype)
        """Of pages and recurrent states that share memory; None: they cannot."""
        self._layers: dict[tuple[Backend, int], tuple[_Weights, _Layer]] = {}
        self._ranges: dict[tuple[Backend, LayerRange, bool, bool], _Range] = {}

    def weight_bytes(self, shard: Shard) -> int:
        """Bytes of weights; the first shard also holds the embedding, the last the output."""
        return self._range(shard).weight_bytes

    def stored_bytes(self, shard: Shard) -> int:
        return self._range(shard).stored_bytes

    def shares_memory(self, shard: Shard) -> bool:
        found = self._range(shard)
        return self.extent is not None and found.n_recurrent <= self.extent.layers * found.n_attention

    def state_bytes(self, shard: Shard, pools: PoolSizes) -> int:
        if pools.state_pages and self.extent is not None:
            own = self._range(shard)
            n_rows = pools.device_rows * self.extent.layers * own.n_attention if own.n_recurrent else 0
            return pools.full_pages * own.device_units[KvGroup.FULL] + n_rows * own.state_row_bytes
        n = {KvGroup.FULL: pools.full_pages, KvGroup.WINDOW: pools.window_pages, KvGroup.RECURRENT: pools.device_states}
        found = self._range(shard)
        of_drafts = pools.draft_states * found.draft_state_bytes
        return of_drafts + sum(n[kv_group] * n_bytes for kv_group, n_bytes in found.device_units.items())

    def host_state_bytes(self, shard: Shard, pools: PoolSizes) -> int:
        n = {KvGroup.FULL: pools.host_pages, KvGroup.RECURRENT: pools.host_states}
        return sum(n.get(kv_group, 0) * n_bytes for kv_group, n_bytes in self._range(shard).host_units.items())

    def workspace_bytes(self, shard: Shard, steps: StepSizes) -> int:
        """Estimate the workspace of a step; see the module docstring."""
        return (
            self.step_bytes(shard, steps)
            + self.graph_bytes(shard, steps)
            + rounding_bytes(shard, self.weight_bytes(shard))
        )

    def step_bytes(self, shard: Shard, steps: StepSizes) -> int:
        """Return the bytes that steps allocate and free, so that all models of a daemon can use the same."""
        found, vocabulary = self._range(shard), self.spec.vocabulary
        if shard.backend is Backend.CPU:
            few = steps.max_sequences <= INT8_GEMV_ROWS
            widened = 2 * max(0 if few else found.end_int8, found.largest_int8)
            return self._cpu_layer_bytes(shard, steps) + steps.max_sequences * vocabulary * 28 * shard.last + widened
        layers = max(self._gpu_layer_bytes(shard, steps), self._captured_bytes(shard, steps))
        if steps.pools.host_pages:
            sketches = steps.pools.host_pages * found.sketch_bytes if steps.ranks_pages else 0
            layers += 2 * HOST_CHUNK_PAGES * found.page_bytes + sketches
        rows = dtype_bytes(self.dtype, steps.max_tokens * self.spec.hidden_size)
        sampling = rows + sampling_bytes(steps.sampled_rows, vocabulary) if shard.last else 0
        return max(layers, sampling) + BLAS_BYTES

    def graph_bytes(self, shard: Shard, steps: StepSizes) -> int:
        """Return the bytes of the pool of graphs on a GPU, and of the input and output that those of chunks share."""
        if shard.backend is Backend.CPU or self.kv_dtype is Dtype.Q8_0:  # whose chunks are not captured
            return 0
        n_rows = 2 * min(steps.max_tokens, GRAPH_ROWS)
        rows = dtype_bytes(self.dtype, n_rows * self.spec.boundary_width)
        return int(self._captured_bytes(shard, steps) * (1 + POOL_MARGIN)) + rows + BLAS_BYTES

    def _cpu_layer_bytes(self, shard: Shard, steps: StepSizes) -> int:
        return max(
            steps.max_tokens * (4 * self.spec.hidden_size + layer.n_rows) * 4 + _mixer_bytes(layer, steps)
            for layer in self._range(shard).layers
        )

    def _captured_bytes(self, shard: Shard, steps: StepSizes) -> int:
        """Peak of a chunk that is padded for a graph; lengths are rounded to powers of two."""
        resident, context = (min(2 * n, GRAPH_LENGTH) for n in (steps.resident, steps.max_context))
        chunk = replace(
            steps, max_tokens=min(steps.max_tokens, GRAPH_ROWS), resident=resident, max_context=context, n_together=1
        )
        return self._gpu_layer_bytes(shard, chunk, in_graph=True)

    def _gpu_layer_bytes(self, shard: Shard, steps: StepSizes, *, in_graph: bool = False) -> int:
        layers = self._range(shard).layers
        scores = SCORE_BYTES if self.dtype is Dtype.FLOAT32 else 0
        return scores + max(self._gpu_peak(layer, steps, in_graph=in_graph) for layer in layers)

    def _gpu_peak(self, layer: _Layer, steps: StepSizes, *, in_graph: bool) -> int:
        n, number, n_seen, kv_bytes = steps.max_tokens, dtype_bytes(self.dtype, 1), 0, 0
        if layer.kv_group is not KvGroup.RECURRENT:
            n_seen, n_pages = _seen(layer, steps)
            kv_bytes = min(n_pages, pages_of(n_seen) + 1) * layer.read_bytes
            if self.kv_dtype is Dtype.Q8_0:  # codes in float32, and their products with scales, of keys or of values
                kv_bytes += 4 * kv_bytes // number
            if steps.pools.host_pages:
                kv_bytes += n * layer.output_width * 4 * 4
        matrix_number = number + 12 * layer.in_blocks  # float32 and integers on the way
        return layer.widths.peak_bytes(n, n_seen, kv_bytes, number, matrix_number, in_graph=in_graph)

    def _range(self, shard: Shard) -> _Range:
        key = (shard.backend, shard.layers, shard.first, shard.last)
        if key not in self._ranges:
            self._ranges[key] = self._sum(*key)
        return self._ranges[key]

    def _sum(self, backend: Backend, layers: LayerRange, first: bool, last: bool) -> _Range:
        ends = _count(non_layer_layouts(self.spec, embedding=first, output=last, backend=backend, dtype=self.dtype))
        adapters = adapter_bytes(self.spec, layers, embedding=first, output=last, dtype=self.dtype)
        indices, kv_dtype = range(layers.start, layers.stop), self.kv_dtype
        own = [self.spec.layers[i] for i in indices]
        found = [self._layer(backend, i) for i in indices]
        weights = [one for one, _ in found]
        device_units, host_units = Counter[KvGroup](), Counter[KvGroup]()
        for layer in own:
            device_units[layer.kv_group] += layer.device_unit_bytes(kv_dtype)
            host_units[layer.kv_group] += layer.unit_bytes(kv_dtype)
        return _Range(
            weight_bytes=sum(one.n_bytes for one in (ends, *weights)) + adapters,
            stored_bytes=sum(one.stored_bytes for one in (ends, *weights)) + adapters,
            largest_int8=max((one.largest_int8 for one in weights), default=0),
            end_int8=ends.largest_int8,
            layers=frozenset(layer for _, layer in found),
            device_units=device_units,
            host_units=host_units,
            draft_state_bytes=sum(
                layer.draft_state_bytes(kv_dtype) for layer in own if layer.kv_group is KvGroup.RECURRENT
            ),
            sketch_bytes=sum(map(_sketch_bytes, own)),
            n_attention=sum(layer.kv_group is KvGroup.FULL for layer in own),
            n_recurrent=sum(layer.kv_group is KvGroup.RECURRENT for layer in own),
            state_row_bytes=max(
                (layer.draft_state_bytes(kv_dtype) for layer in own if layer.kv_group is KvGroup.RECURRENT), default=0
            ),
            page_bytes=sum({layer.unit_bytes(kv_dtype) for layer in own if layer.kv_group is KvGroup.FULL}),
        )

    def _layer(self, backend: Backend, i: int) -> tuple[_Weights, _Layer]:
        if (backend, i) not in self._layers:
            layer, read_as = self.spec.layers[i], self.dtype if self.kv_dtype is Dtype.Q8_0 else self.kv_dtype
            weights = _count(layer_layouts(self.spec, i, backend, self.dtype), layer.n_routed)
            source = layer if layer.shares_with is None else self.spec.layers[layer.shares_with]
            self._layers[backend, i] = (
                weights,
                _Layer(
                    layer.kv_group,
                    layer.window or 0,
                    weights.n_rows,
                    max((prod(t.shape[:-1]) for t in layer.state), default=0),
                    layer.unit_bytes(self.kv_dtype),
                    source.unit_bytes(read_as),
                    _query_groups(source),
                    _output_width(source),
                    weights.in_blocks,
                    LayerWidths.of(layer, source, self.spec.hidden_size),
                ),
            )
        return self._layers[backend, i]


def rounding_bytes(shard: Shard, weight_bytes: int) -> int:
    """Return the bytes that torch's allocator takes beside the weights on a GPU."""
    return 0 if shard.backend is Backend.CPU else int(weight_bytes * WEIGHTS_MARGIN)


def _seen(layer: _Layer, steps: StepSizes) -> tuple[int, int]:
    """Return the positions that a slice sees in an attention layer, and the pages of its KV group."""
    if layer.kv_group is not KvGroup.WINDOW:
        return steps.resident, steps.pools.full_pages
    seen = min(steps.max_context, layer.window - 1 + steps.max_tokens) if layer.window else steps.max_context
    return seen, steps.pools.window_pages


def _mixer_bytes(layer: _Layer, steps: StepSizes) -> int:
    """Attention or delta rule of a layer on a cpu."""
    if layer.kv_group is KvGroup.RECURRENT:
        return steps.max_tokens * layer.state_rows * RULE_COPIES * 4 + steps.n_together * layer.unit_bytes * 2
    seen, n_pages = _seen(layer, steps)
    partial = steps.max_tokens * layer.output_width * 4 * 4 if steps.pools.host_pages else 0
    read = partial + steps.n_together * min(n_pages, pages_of(seen) + 1) * layer.read_bytes
    return read + steps.max_tokens * layer.query_groups * seen * (1 + 4)


def _count(layouts: list[TensorLayout], n_routed: int = 0) -> _Weights:
    """Sum over some weights; each of ``n_routed`` experts has rows in both directions."""
    matrices = [layout for layout in layouts if len(layout.shape) >= 2 and layout.role is not TensorRole.LOOKUP]
    return _Weights(
        n_bytes=sum(layout.n_bytes for layout in layouts),
        stored_bytes=sum(
            prod(layout.shape) // layout.kind.block_elements * layout.kind.block_bytes for layout in layouts
        ),
        n_rows=sum(
            layout.shape[-2] if len(layout.shape) == 2 else n_routed * (layout.shape[-2] + layout.shape[-1])
            for layout in matrices
        ),
        largest_int8=max(
            (prod(layout.shape[-2:]) for layout in matrices if layout.format is WeightFormat.INT8), default=0
        ),
        in_blocks=any(layout.format is WeightFormat.BLOCKS for layout in matrices),
    )


def _query_groups(layer: LayerSpec) -> int:
    values = next((t for t in layer.state if t.name == "v"), None)
    width = _output_width(layer)
    if values is None or not width:
        return 1
    return max(1, width // (values.shape[-1] * values.shape[-2]))


def _sketch_bytes(layer: LayerSpec) -> int:
    keys = next((t for t in layer.state if t.name == "k" and layer.kv_group is KvGroup.FULL), None)
    if keys is None:
        return 0
    n_heads, width = prod(keys.shape[1:-1]), keys.shape[-1]
    return n_heads * (2 * width + PAGE_TOKENS * (-(-width // 8) + 2))


def _output_width(layer: LayerSpec) -> int:
    """Return the numbers that attention puts out per token; 0 for a layer without."""
    return next((shape[-1] for name, shape in layer.tensors.items() if name.endswith("attn_output.weight")), 0)
