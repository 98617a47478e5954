"""Training steps of a drafter; on a GPU each width of batches has its CUDA graph of a whole step."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
from torch import Tensor, nn

from data import Batch
from optimizer import Optimizer

Loss = Callable[[Batch], tuple[Tensor, Tensor]]


class Trainer:
    """``loss_of`` gives the loss and the shares of right tokens.  Steps belong on the stream ``self.stream``."""

    def __init__(self, model: nn.Module, loss_of: Loss, optimizer: Optimizer, graphs: bool) -> None:
        self.model, self.loss_of, self.optimizer, self.with_graphs = model, loss_of, optimizer, graphs
        self.cuda = optimizer.rate.is_cuda
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.seen: dict[int, int] = {}
        self.inputs: dict[int, Batch] = {}
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.memory: tuple[int, int] | None = None

    def eager(self, batch: Batch) -> Tensor:
        """One step; the loss and the shares."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.cuda, cache_enabled=False):
            loss, right = self.loss_of(batch)
        loss.backward()
        self.optimizer.step()
        return torch.cat((loss.detach()[None].float(), right))

    def capture(self, width: int, batch: Batch) -> None:
        """Record a step on batches of this width.  The weights do not change."""
        self.inputs[width] = Batch(*(t.clone() for t in batch.tensors()))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory, stream=self.stream):
            entry = self.eager(self.inputs[width])
        self.memory = graph.pool()
        self.graphs[width] = graph, entry

    def step(self, batch: Batch, rate: float) -> Tensor:
        self.optimizer.rate.fill_(rate)
        width = batch.ids.shape[1]
        self.seen[width] = self.seen.get(width, 0) + 1
        if not self.with_graphs or self.seen[width] <= 2:  # the first steps compile and fill caches
            return self.eager(batch)
        if width not in self.graphs:
            try:
                self.capture(width, batch)
            except RuntimeError:
                traceback.print_exc()
                print("a step cannot be recorded: going on without graphs", flush=True)
                self.with_graphs = False
                for p in self.model.parameters():
                    p.grad = None
                return self.eager(batch)
        for static, new in zip(self.inputs[width].tensors(), batch.tensors(), strict=True):
            static.copy_(new)
        graph, entry = self.graphs[width]
        graph.replay()
        return entry
