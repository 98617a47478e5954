"""The planner's workspace of a GPU is what the daemon's own code allocates there.

Kernels are left out, as a cpu would take minutes for them; all tensors that they read and write are allocated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from daemons.models.stage import LoadedStage
from daemons.ops.moe import ExpertMlp
from daemons.ops.selection import KernelSelector
from daemons.random_sampling import draw
from lucevisor.config import DeviceRef
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.placement.cost import CostModel, StepSizes
from lucevisor.placement.gpu_workspace import BLAS_BYTES, sampling_bytes
from lucevisor.placement.result import Shard
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.steps import OpenSequence, Operation, SamplingParams, SetPages, Slice, Step, ZeroState
from tests.model.qwen35_file import Shape, write

N_SEQUENCES, MAX_TOKENS = 33, 1200
DENSE = Shape(
    n_layers=4, embedding=1024, feed_forward=3584, n_heads=6, n_kv_heads=1, head_dim=256, key_heads=4, value_heads=12,
    delta_dim=128, vocabulary=8192, context=65536,
)  # fmt: skip
EXPERTS = Shape(
    n_layers=4, embedding=1024, feed_forward=256, n_heads=8, n_kv_heads=1, head_dim=256, key_heads=8, value_heads=16,
    delta_dim=128, vocabulary=8192, context=65536, n_experts=32, n_used=8,
)  # fmt: skip
STEPS = {
    "a prompt": [(0, 1024)],
    "the end of a long prompt": [(65536 - 1024, 1024)],
    "beside drafts": [(65536 - 896, 896), *[(640, 9)] * 32],
    "drafts": [(640, 9)] * 32,
}


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that are made within it and alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(found: object) -> Iterator[torch.UntypedStorage]:
            return (x.untyped_storage() for x in tree_leaves(found) if isinstance(x, Tensor))

        known = {storage._cdata for storage in storages((args, kwargs or {}))} | self._sizes.keys()
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage._cdata not in known:
                self._sizes[storage._cdata] = -(-storage.nbytes() // 512) * 512
                self.live += self._sizes[storage._cdata]
                known.add(storage._cdata)
                weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self.live)
        return out

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs, on tensors of the cpu, without the kernels."""

    def selector(_: torch.device, dtype: torch.dtype, *, batch_invariant: bool) -> KernelSelector:
        found = KernelSelector(torch.device("cpu"), torch.float32, kernels=True, batch_invariant=batch_invariant)
        found.dtype = dtype
        return found

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **options: None)
    monkeypatch.setattr("daemons.models.stage.KernelSelector", selector)
    monkeypatch.setattr("daemons.models.stage.torch_device", lambda backend, index: torch.device("cpu"))
    monkeypatch.setattr("daemons.models.stage.prepare", lambda backend, threads: None)
    for module in ("daemons.ops.attention", "daemons.kv.batch"):
        monkeypatch.setattr(f"{module}.is_flash_device", lambda device: True)
    monkeypatch.setattr("daemons.ops.attention._flash", lambda q, *others: torch.empty_like(q))
    monkeypatch.setattr(ExpertMlp, "results", ExpertMlp.grouped)


def loaded(spec: ModelSpec) -> LoadedStage:
    pools = PoolSizes(full_pages=64, window_pages=0, states=N_SEQUENCES)
    plan = StagePlan(0, [ShardPlan(0, LayerRange(0, spec.n_layers))], None, None, embedding=True, output=True)
    sizes = {"max_sequences": N_SEQUENCES, "max_step_tokens": MAX_TOKENS}
    load = Load([], Dtype.BFLOAT16, Dtype.BFLOAT16, [plan], [], pools, **sizes)
    return LoadedStage.load(spec, plan, load, Backend.CUDA, lambda progress: None)


@torch.inference_mode()
def peak_of(stage: LoadedStage, slices: list[tuple[int, int]]) -> int:
    """Bytes that a step of slices (start, tokens) allocates at most."""
    opening: list[Operation] = []
    for i, (start, n) in enumerate(slices):
        pages = [page % 64 for page in range((start + n - 1) // PAGE_TOKENS + 1)]
        opening += [ZeroState(i), OpenSequence(i, i, SamplingParams()), SetPages(i, KvGroup.FULL, 0, pages)]
    stage.apply(opening)
    with Allocated() as allocated:
        stage.forward(Step(1, 0, [], [Slice(i, start, [0] * n, True) for i, (start, n) in enumerate(slices)]), None)
    stage.reset()
    return allocated.peak


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_workspace.py measures there")
@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_estimate_of_a_step_is_what_it_allocates(shape: Shape, no_kernels: None, tmp_path: Path) -> None:
    spec = open_spec(write(tmp_path / "model.gguf", shape))
    stage, cost = loaded(spec), CostModel(spec, Dtype.BFLOAT16, Dtype.BFLOAT16)
    shard = Shard(DeviceRef("cuda", 0), Backend.CUDA, LayerRange(0, spec.n_layers), first=True, last=True)
    for name, slices in STEPS.items():
        n, context = sum(n for _, n in slices), max(start + n for start, n in slices)
        sizes = StepSizes(n, len(slices), context, context, len(slices), PoolSizes(1 << 20, 0, 1), sampled_rows=1)
        ratio = cost._gpu_layer_bytes(shard, sizes) / peak_of(stage, slices)
        assert 0.99 < ratio < (1.4 if name == "drafts" else 1.15), f"{name}: {ratio:.3f}"
        assert cost.step_bytes(shard, sizes) >= cost._gpu_layer_bytes(shard, sizes) + BLAS_BYTES


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(top_k=40), SamplingParams(top_p=0.999)],
    ids=["plain", "top_k", "flat"],
)
@pytest.mark.parametrize("n_rows", [1, 16, 256])
def test_the_estimate_of_draws_is_what_they_allocate(sampling: SamplingParams, n_rows: int) -> None:
    """Beside logits, and the log-probabilities that a client may ask for."""
    vocabulary = 20_000
    logits = torch.randn(n_rows, vocabulary, generator=torch.Generator().manual_seed(1)) * 0.01
    held, work = 8 * n_rows * vocabulary, partial(draw, logits, [sampling] * n_rows, [*range(n_rows)])
    with Allocated() as allocated:
        work()
    assert held + allocated.peak <= 1.02 * sampling_bytes(n_rows, vocabulary)  # and the ids of the vocabulary
