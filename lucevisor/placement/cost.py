"""Cost model: the bytes of a shard's weights, state and workspace (peak activation memory; vLLM's memory profiling).

Weights follow :mod:`lucevisor.model.weight_layout`, as the loader does, and state the specs' table, as the pools do, so
both are exact.  The workspace is an estimate of the peak during a step with the daemons' plain torch operations; a
layer frees its part before the next one begins, so the largest layer counts:

    activations  T (4 E + sum of matrix rows of a layer) x 4 bytes             float32 copies of a layer's activations
    delta rule   T x rows of a state x RULE_COPIES x 4                         frames, decays, solved systems
                 B x states of a layer x 2                                     states gathered and written back
    attention    B x pages per sequence x page of a layer                      keys and values, padded to the longest;
                                                                               on a GPU of one long slice at a time
                 T x (query heads per kv head) x L x (1 + b)                   the mask, as flags and as numbers; on a
                                                                               GPU of windows and graphs
                 SCORE_BYTES                                                   float32 on a GPU: scores in plain steps
    host pages   2 x HOST_CHUNK_PAGES x page of a layer of each shape             chunks on a GPU
                 host pages x sketches of the keys of each layer               where pages are ranked
                 T x query heads x head dim x 4 x 4                            parts of the output that are merged
    output       n_sequences x V x 28                                          logits, sorted values and ids, counts
    GPU          min(largest matrix of blocks, DEQUANT_ELEMENTS) (12 + b)      dequantised in parts before GEMM
                 96 MiB                                                        workspace of the BLAS libraries
    graphs       the above of G tokens that attend to GRAPH_LENGTH positions   beside the eager step's, on a GPU: they
                 2 G x boundary width x b                                      have a pool, one input and one output
    cpu          largest int8 matrix x 2                                       widened for GEMM

T tokens of a step, G <= GRAPH_ROWS of one in a graph, where kernels keep activations in b bytes and the delta rule
takes KERNEL_COPIES, B sequences decoded together, L longest sequence, E hidden size, V vocabulary, b bytes of a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, replace
from math import prod

from lucevisor.model.extents import extent_of
from lucevisor.model.lora_files import adapter_bytes
from lucevisor.model.pages import pages_of
from lucevisor.model.quant_types import WeightFormat
from lucevisor.model.spec import LayerSpec, ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange, dtype_bytes
from lucevisor.model.weight_layout import QUANTISED_FORMATS, TensorLayout, TensorRole, layer_layouts, non_layer_layouts
from lucevisor.model.workspace import (
    DEQUANT_ELEMENTS,
    GRAPH_LENGTH,
    GRAPH_ROWS,
    HOST_CHUNK_PAGES,
    INT8_GEMV_ROWS,
    SCORE_ELEMENTS,
)
from lucevisor.placement.devices import HOST
from lucevisor.placement.result import Shard
from lucevisor.protocol.loading import PoolSizes

RULE_COPIES, KERNEL_COPIES = 16, 4
SCORE_BYTES = 3 * 4 * SCORE_ELEMENTS
"""Scores in float32, masked, and their softmax."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of steps and pools.  ``n_together``: sequences decoded in one step.  ``resident``: positions of a sequence
    in KV group full that are attended to at once."""

    max_tokens: int
    max_sequences: int
    max_context: int
    resident: int
    n_together: int
    pools: PoolSizes
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
    largest_blocks: int  # elements of the largest matrix kept as blocks or packed weights
    largest_int8: int


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


@dataclass(frozen=True, slots=True)
class _Range:
    """Sums over the layers of a shard, with the embedding and the output if it has them."""

    weight_bytes: int
    stored_bytes: int
    largest_blocks: int
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
        found = self._range(shard)
        out = self._layer_bytes(shard, steps, 4, RULE_COPIES)
        if shard.last:
            out += steps.max_sequences * self.spec.vocabulary * 28
        if shard.backend is Backend.CPU:
            few = steps.max_sequences <= INT8_GEMV_ROWS
            return out + 2 * max(0 if few else found.end_int8, found.largest_int8)
        if steps.pools.host_pages:
            sketches = steps.pools.host_pages * found.sketch_bytes if steps.ranks_pages else 0
            out += 2 * HOST_CHUNK_PAGES * found.page_bytes + sketches
        expanded = min(DEQUANT_ELEMENTS, found.largest_blocks)
        scores = SCORE_BYTES if self.dtype is Dtype.FLOAT32 else 0
        out += expanded * (12 + dtype_bytes(self.dtype, 1)) + (96 << 20) + scores
        if self.kv_dtype is Dtype.Q8_0:  # whose chunks are not captured
            return out
        return out + self._graph_bytes(shard, steps) + expanded * dtype_bytes(self.dtype, 1) + scores

    def _layer_bytes(self, shard: Shard, steps: StepSizes, number: int, rule_copies: int) -> int:
        """Activations of the largest layer, of ``number`` bytes each."""
        row = 4 * self.spec.hidden_size
        return max(
            steps.max_tokens * (row + layer.n_rows) * number
            + _mixer_bytes(layer, shard.backend, steps, rule_copies, dtype_bytes(self.dtype, 1))
            for layer in self._range(shard).layers
        )

    def _graph_bytes(self, shard: Shard, steps: StepSizes) -> int:
        """Workspace of graphs of one long slice, with input and output; lengths are rounded to powers of two."""
        n, positions = min(steps.max_tokens, GRAPH_ROWS), min(2 * steps.resident, GRAPH_LENGTH)
        context = min(2 * steps.max_context, GRAPH_LENGTH)
        slice_steps = replace(steps, max_tokens=n, max_context=context, resident=positions, n_together=1)
        number = dtype_bytes(self.dtype, 1)
        return self._layer_bytes(shard, slice_steps, number, KERNEL_COPIES) + 2 * n * self.spec.boundary_width * number

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
            largest_blocks=max(one.largest_blocks for one in (ends, *weights)),
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
                ),
            )
        return self._layers[backend, i]


def _mixer_bytes(layer: _Layer, backend: Backend, steps: StepSizes, rule_copies: int, number: int) -> int:
    """Attention or delta rule of a layer, in numbers of ``number`` bytes."""
    if layer.kv_group is KvGroup.RECURRENT:
        return steps.max_tokens * layer.state_rows * rule_copies * 4 + steps.n_together * layer.unit_bytes * 2
    seen, n_pages = steps.resident, steps.pools.full_pages
    if layer.kv_group is KvGroup.WINDOW:
        seen, n_pages = steps.max_context, steps.pools.window_pages
        if layer.window:
            seen = min(seen, layer.window - 1 + steps.max_tokens)
    partial = steps.max_tokens * layer.output_width * 4 * 4 if steps.pools.host_pages else 0
    on_gpu = backend is not Backend.CPU  # its kernels read the pages of short slices in place
    n_gathered = 1 if on_gpu else steps.n_together
    read = partial + n_gathered * min(n_pages, pages_of(seen) + 1) * layer.read_bytes
    in_graph = rule_copies == KERNEL_COPIES
    if on_gpu and not (layer.window or in_graph):
        return read
    return read + steps.max_tokens * layer.query_groups * seen * (1 + number)


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
        largest_blocks=_largest(matrices, QUANTISED_FORMATS),
        largest_int8=_largest(matrices, {WeightFormat.INT8}),
    )


def _largest(matrices: list[TensorLayout], forms: Set[WeightFormat]) -> int:
    """Return the elements of the largest matrix in one of the formats.

    Quantised experts count together, as many are dequantised at a time; int8 experts are widened one by one.
    """
    shapes = (
        layout.shape if layout.format in QUANTISED_FORMATS else layout.shape[-2:]
        for layout in matrices
        if layout.format in forms
    )
    return max((prod(shape) for shape in shapes), default=0)


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
