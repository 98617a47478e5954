"""The blocks of one shard: its layers on its device, with the embedding or the output matrix at the pipeline's ends.

Knows no links and no sequences.  Invariant: the residual stream has the compute dtype throughout, so a boundary inside
or between shards changes no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from daemons.device import memory_free
from daemons.errors import LoadError
from daemons.kv.batch import Batch
from daemons.kv.pools import Pools
from daemons.models import FAMILIES
from daemons.models.blocks import Block, PreNormLayer
from daemons.models.loader import WeightLoader
from daemons.models.lora import LoraWeights
from daemons.ops.lora import LoraContext
from daemons.ops.selection import KernelSelector
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype
from lucevisor.model.weight_layout import shard_layouts
from lucevisor.protocol.loading import DeviceUse, PoolSizes, ShardPlan


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Configuration of one shard of ``spec``, with the embedding or the output matrix where set.

    ``captures``: its layers, ascending, whose residual stream a drafter reads.
    """

    spec: ModelSpec
    plan: ShardPlan
    embedding: bool
    output: bool
    backend: Backend
    dtype: Dtype
    kv_dtype: Dtype
    pools: PoolSizes
    captures: tuple[int, ...] = ()
    rank_pages: bool = False


class ShardOutput(NamedTuple):
    """``rows``: boundary rows [T, boundary width], with an output matrix [T, E].  ``captures`` [T, n E]: the residual
    stream after each captured layer; None without any.
    """

    rows: Tensor
    captures: Tensor | None


class SharedOutput:
    """One output of up to ``n_rows`` rows for several graphs; called with each one's own."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self._parts: list[Tensor] = []

    def __call__(self, out: ShardOutput) -> ShardOutput:
        parts = [x for x in out if x is not None]
        if not self._parts:
            self._parts = [x.new_empty(self.n_rows, x.shape[1]) for x in parts]
        shared = [whole[: len(x)].copy_(x) for whole, x in zip(self._parts, parts, strict=True)]
        return ShardOutput(shared[0], shared[1] if len(shared) > 1 else None)


class ShardModel:
    """A built shard.  ``embedding`` is None except at the start of the pipeline, ``output`` except at its end."""

    def __init__(
        self,
        config: ShardConfig,
        selector: KernelSelector,
        report: Callable[[int, int], None],
        on_layer: Callable[[ShardModel, int], None] = lambda shard, missing_bytes: None,
    ) -> None:
        """``on_layer`` is called when pools and embedding are there, and when a layer more can run; with it, how many
        bytes of weights are missing.
        """
        spec, layers = config.spec, config.plan.layers
        self.device, self.plan, self.selector, self.spec = selector.device, config.plan, selector, spec
        self.page_sums = selector.operations.page_sums()
        self.pools = Pools(
            spec,
            layers,
            self.device,
            config.kv_dtype,
            config.pools,
            rank_pages=config.rank_pages,
            page_copy=selector.operations.page_copy(),
            apply_updates=selector.operations.apply_updates,
        )
        kept = shard_layouts(
            spec, layers, embedding=config.embedding, output=config.output, backend=config.backend, dtype=config.dtype
        )
        weights = WeightLoader(spec.files, kept, selector, report)
        self.lora = LoraContext(selector.product)
        if spec.adapters:
            weights.lora = LoraWeights(spec.adapters, self.lora, self.device, selector.dtype)
        try:
            family = FAMILIES[spec.architecture](spec, weights, self.pools)
            self.from_boundary, self.to_boundary = family.from_boundary, family.to_boundary
            self.embedding: Callable[[Batch], Tensor] | None = family.embedding() if config.embedding else None
            self.layers: list[Block] = []
            n_bytes = sum(layout.n_bytes for layout in kept)
            on_layer(self, n_bytes - weights.n_bytes)
            for i in range(layers.start, layers.stop):
                self.layers.append(family.layer(i))
                on_layer(self, n_bytes - weights.n_bytes)
            self.output = family.output() if config.output else None
            weights.finish()
        finally:
            weights.close()
        self.table = weights.tables.get("token_embd.weight")  # None without the embedding
        self.captured = [i in config.captures for i in range(layers.start, layers.stop)]
        self.weight_bytes = weights.n_bytes + (0 if weights.lora is None else weights.lora.n_bytes)
        n_routed = max((spec.layers[i].n_routed for i in range(layers.start, layers.stop)), default=0)
        self.max_async_tokens = selector.max_async_pairs // max(1, n_routed)
        """Tokens of a step up to which routing never synchronises with the host."""
        self.warnings = selector.warnings + [
            f"{name} tensors are not kept as stored: {stored} bytes in the file take {taken} bytes on {self.device}"
            for name, (stored, taken) in sorted(weights.converted.items())
        ]
        if not self.pools.page_locked:
            what = f"{self.pools.host_nbytes} bytes of checkpoints and pages in host memory"
            self.warnings.append(f"{what} cannot be page-locked: they are slower to use on {self.device}")

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Run one layer of each kind alone: layers of a kind have tensors of the same shapes and types."""
        layers, captured = self.layers, self.captured
        kinds: dict[object, int] = {}
        for i in range(len(layers)):
            kinds.setdefault(self._kind(self.plan.layers.start + i), i)
        self.layers, self.captured = [layers[i] for i in kinds.values()], [captured[i] for i in kinds.values()]
        self.captured[-1] |= any(captured)
        try:
            yield
        finally:
            self.layers, self.captured = layers, captured

    def _kind(self, i: int) -> object:
        layer, files = self.spec.layers[i], self.spec.files
        tensors = ((name.removeprefix(f"blk.{i}."), files.tensors[name]) for name in sorted(layer.tensors))
        shapes = tuple((name, tensor.kind, tensor.shape) for name, tensor in tensors)
        return layer.kv_group, layer.window, layer.state, layer.shares_with is not None, shapes

    def run(self, rows: Tensor | None, batch: Batch, hidden: list[Tensor] | None = None) -> ShardOutput:
        """Boundary rows [T, boundary width] through the layers.

        ``hidden``, when given, collects the residual stream after the embedding and after every layer.
        """
        with self.lora.of(batch.lora):
            return self._run(rows, batch, hidden)

    def _run(self, rows: Tensor | None, batch: Batch, hidden: list[Tensor] | None) -> ShardOutput:
        if self.embedding is not None:
            rows = self.embedding(batch)
        assert rows is not None
        h = self.from_boundary(rows, batch)
        if self.embedding is not None and hidden is not None:
            hidden.append(h)
        captures: list[Tensor] = []
        delta: Tensor | None = None  # the last layer's addition, which the next one adds as it norms
        for layer, captured in zip(self.layers, self.captured, strict=True):
            if isinstance(layer, PreNormLayer):
                h, delta = layer.advance(h, delta, batch)
            else:
                h = layer(h, batch)
            if delta is not None and (captured or hidden is not None or layer is self.layers[-1]):
                h, delta = self.selector.operations.add(h, delta), None
            if captured:
                captures.append(h)
            if hidden is not None:
                hidden.append(h)
        rows = h if self.output is not None else self.to_boundary(h, batch)
        return ShardOutput(rows, self.selector.operations.concatenate(captures) if captures else None)

    def usage(self) -> DeviceUse:
        return DeviceUse(
            device=self.plan.device,
            layers=self.plan.layers,
            weight_bytes=self.weight_bytes,
            state_bytes=self.pools.nbytes,
            free_bytes=memory_free(self.device),
            host_state_bytes=self.pools.host_nbytes,
        )


def check(config: ShardConfig) -> None:
    """Raise LoadError for a plan that does not fit this model, before any memory is allocated."""
    spec, layers = config.spec, config.plan.layers
    where = f"stage shard {layers} on device {config.plan.device}"
    if spec.architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise LoadError(
            where,
            f"architecture {spec.architecture!r} is not one of {known}",
            "use a file of a known family",
            configuration=True,
        )
    if not 0 <= layers.start < layers.stop <= spec.n_layers:
        raise LoadError(
            where, f"the model has layers [0,{spec.n_layers})", "correct the plan's layer ranges", configuration=True
        )
    for layer in spec.layers[layers.start : layers.stop]:
        if layer.shares_with is not None and layer.shares_with not in layers:
            reason = f"layer {layer.index} reads pages of layer {layer.shares_with}, which is on another shard"
            raise LoadError(where, reason, "move the layer split", configuration=True)


def stream_dtype(h: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Boundary rows on the next shard's device, in the compute dtype."""
    return h.to(device=device, dtype=dtype, non_blocking=True)
