"""Loads the libraries and kernels that a GPU needs for many rows of a layer, while the first layer is read.

A first product or attention, or the first launch of a kernel takes 5 to 200 ms, in which the device would be idle.
Computes zeros of a layer's shapes, as the header has them; knows no weights and no state.
"""

from __future__ import annotations

import torch

from daemons.ops.attention import Causal, attention
from daemons.ops.operations import SHORT_SLICE, DeltaNetPools, GatedDeltaNetParams
from daemons.ops.selection import KernelSelector
from daemons.weights.packed import TILES, empty_packed
from lucevisor.model.quant_types import TILE_ROWS
from lucevisor.model.spec import LayerSpec, ModelSpec
from lucevisor.model.values import LayerRange, Space

EPSILON = 1e-6


def load_kernels(spec: ModelSpec, layers: LayerRange, selector: KernelSelector, n_rows: int) -> None:
    """Launch what ``n_rows`` rows of these layers need, on the current stream of ``selector``'s device.

    Raises RuntimeError, as torch does.
    """
    own = spec.layers[layers.start : layers.stop]
    rows = torch.zeros(n_rows, spec.hidden_size, dtype=selector.dtype, device=selector.device)
    norm = selector.operations.norm(torch.ones(spec.hidden_size, device=selector.device), spec.hidden_size, EPSILON)
    norm.fused_add(rows, rows)
    if selector.kernels:
        _products(spec, own, selector, rows)
    _attention(own, selector)
    if layers.start == 0:
        _lookup(spec, selector, n_rows)
    recurrent = next((layer for layer in own if layer.space is Space.RECURRENT), None)
    if recurrent is not None:
        _delta_net(recurrent, selector, n_rows)


def _products(spec: ModelSpec, layers: tuple[LayerSpec, ...], selector: KernelSelector, rows: torch.Tensor) -> None:
    from daemons.ops.packed_linear import PackedLinear

    assert spec.files is not None
    tensors = (spec.files.tensors[name] for layer in layers for name in layer.tensors if name in spec.files.tensors)
    kinds = {t.kind.name: t.kind for t in tensors if len(t.shape) == 2 and t.kind.name in TILES}
    for kind in kinds.values():
        packed = empty_packed(kind, TILE_ROWS, spec.hidden_size, selector.device)
        packed.tiles.zero_()
        selector.operations.act_and_mul(PackedLinear(packed, spec.hidden_size)(rows), "silu")


def _lookup(spec: ModelSpec, selector: KernelSelector, n_rows: int) -> None:
    """Rows of the token table, which nothing else needs before the first layer."""
    assert spec.files is not None
    for kind, shape in ((spec.files.tensors[name].kind, shape) for name, shape in spec.embedding_tensors.items()):
        if kind.name in TILES and selector.kernels:
            packed = empty_packed(kind, TILE_ROWS, shape[-1], selector.device)
            packed.tiles.zero_()
            ids = torch.zeros(n_rows, dtype=torch.int64, device=selector.device)
            selector.table(kind, packed, shape[-1])(ids)


def _delta_net(layer: LayerSpec, selector: KernelSelector, n_rows: int) -> None:
    convolution, matrices = (part.shape for part in layer.state)
    n_value, dim = matrices[:2]
    n_key = (convolution[1] // dim - n_value) // 2

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=selector.device)

    norm = selector.operations.norm(zeros(dim), dim, EPSILON)
    taps = zeros(convolution[0] + 1, convolution[1])
    params = GatedDeltaNetParams(n_key, n_value, dim, taps, zeros(n_value), zeros(n_value), norm)
    compute = selector.operations.gated_delta_net(params)
    if compute is not None and compute.max_tokens is None:
        ids, kept = zeros(1, dtype=torch.int64), zeros(1, 0, dtype=torch.int64)
        spans = torch.tensor([[0, n_rows]], device=selector.device)
        inputs = zeros(n_rows, params.columns, dtype=selector.dtype)
        pools = DeltaNetPools(zeros(1, *convolution), zeros(1, *matrices), zeros(1, layer.state[1].update_width))
        compute(inputs, pools, ids, kept, spans)
        selector.operations.apply_updates(pools.states[None], pools.updates[None], 0, ids, 0)


def _attention(layers: tuple[LayerSpec, ...], selector: KernelSelector) -> None:
    """Few rows do: the library's kernels are loaded together."""
    paged = next((layer for layer in layers if layer.space is Space.FULL and layer.state), None)
    if paged is not None:
        heads, dim = paged.state[0].shape[-2:]
        x = torch.zeros(1, SHORT_SLICE, heads, dim, dtype=selector.dtype, device=selector.device)
        attention(x, x, x, Causal.CAUSAL, scale=1.0)
