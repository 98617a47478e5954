"""The scoring stage: a whole small model on one device, without its output matrix, with one window of pages.

A window arrives in messages of a few tokens each, so that steps of other stages of this daemon run between them.
Invariant: a window begins at position 0 and goes on where the message before ended.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from daemons.device import launching, memory_free, prepare, torch_device, torch_dtype
from daemons.errors import LoadError, StateError
from daemons.heartbeat import progress_of
from daemons.kv.batch import Batch, Layout
from daemons.kv.sequences import Sequences
from daemons.models.shard import ShardConfig, ShardModel, check
from daemons.ops.paged import Pages
from daemons.ops.selection import KernelSelector
from daemons.relevance.attention import AttentionScores
from lucevisor.model.families import open_spec
from lucevisor.model.pages import pages_of
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, KvGroup, LayerRange
from lucevisor.protocol.loading import DeviceUse, Load, PoolSizes, ScorePlan, ShardPlan, score_pools
from lucevisor.protocol.messages import Progress, ScoreWindow
from lucevisor.protocol.steps import CloseSequence, OpenSequence, Operation, SamplingParams, SetPages, Slice, ZeroState


class ScoreStage:
    """A loaded scoring model; see :meth:`load`."""

    def __init__(self, spec: ModelSpec, plan: ScorePlan, shard: ShardModel, pools: PoolSizes) -> None:
        self.spec, self.plan, self.device = spec, plan, shard.device
        self._shard, self._pools = shard, pools
        self._sequences = Sequences([shard.pools], pools, max_sequences=1)
        self._n = 0  # tokens of the window so far
        self.kernels = {f"{name} (scoring)": kernel for name, kernel in shard.selector.selected.items()}
        self.warnings = shard.warnings

    @classmethod
    @torch.inference_mode()
    def load(cls, load: Load, backend: Backend, progress: Callable[[Progress], None]) -> ScoreStage:
        """Load the model of ``load.score`` and run one window, which compiles its kernels.

        Raises GgufError, LoadError (file, tensor) or DeviceError (device, tensor, bytes).
        """
        plan = load.score
        assert plan is not None
        prepare(backend, load.threads)
        spec = open_spec(Path(plan.files[0]))
        if not any(layer.kv_group is KvGroup.FULL for layer in spec.layers):
            reason = "no layer attends to all positions, so it cannot score"
            raise LoadError(spec.name, reason, "name another model in pflash.path", configuration=True)
        pools = score_pools(spec.kv_groups(), plan.window_tokens)
        layers = LayerRange(0, spec.n_layers)
        config = ShardConfig(
            spec=spec,
            plan=ShardPlan(plan.device, layers),
            embedding=True,
            output=False,
            backend=backend,
            dtype=load.dtype,
            kv_dtype=load.kv_dtype,
            pools=pools,
        )
        check(config)
        selector = KernelSelector(torch_device(backend, plan.device), torch_dtype(load.dtype))
        shard = ShardModel(config, selector, progress_of(progress, -1, plan.device))
        stage = cls(spec, plan, shard, pools)
        n = min(plan.window_tokens, plan.step_tokens)
        stage.score(ScoreWindow(0, 0, [0] * n, n_query=min(n, 8)))
        return stage

    @torch.inference_mode()
    def score(self, message: ScoreWindow) -> Tensor | None:
        """Add tokens to the window; with its last ones, return float32 scores of all its tokens, on the host.

        Raises StateError for tokens that do not follow those before.
        """
        n, where = len(message.tokens), f"window {message.window} at {message.start}"
        end = message.start + n
        if not 0 < n <= self.plan.step_tokens or end > self.plan.window_tokens or message.n_query > n:
            limits = f"{self.plan.step_tokens} at a time, {self.plan.window_tokens} of a window"
            raise StateError(where, f"{n} tokens, {message.n_query} of them ask; loaded for {limits}")
        if message.start == 0:
            self._begin()
        elif message.start != self._n:
            raise StateError(where, f"the window has {self._n} tokens")
        self._n = end
        self._sequences.flush()
        layout = Layout([Slice(0, message.start, message.tokens, sample=False)], self._sequences, self.spec)
        batch = Batch(layout, self._sequences.tables(self.device), layout.on(self.device))
        scores = None
        if message.n_query:
            scores = batch.probe = AttentionScores(end, message.n_query, self._read(end), self.device)
        with launching(self.device):
            self._shard.run(None, batch)
            return scores.result().cpu() if scores is not None else None

    def usage(self) -> DeviceUse:
        """Memory of the model, measured."""
        own = self._shard
        layers, free = LayerRange(0, self.spec.n_layers), memory_free(self.device)
        return DeviceUse(self.plan.device, layers, own.weight_bytes, own.pools.nbytes, free)

    def _begin(self) -> None:
        operations: list[Operation] = [] if not self._sequences.by_id else [CloseSequence(0)]
        operations.append(OpenSequence(0, 0, SamplingParams()))
        if self._pools.states:
            operations.append(ZeroState(0))
        for kv_group, n_pages in ((KvGroup.FULL, self._pools.full_pages), (KvGroup.WINDOW, self._pools.window_pages)):
            if n_pages:
                operations.append(SetPages(0, kv_group, 0, list(range(n_pages))))
        for operation in operations:
            self._sequences.apply(operation)

    def _read(self, n: int) -> Pages:
        """The first ``n`` positions of the pool."""
        if self.device.type == "cpu":
            return Pages(None, 1, 0, n)
        return Pages(torch.arange(pages_of(n), device=self.device), 1, 0, n)
