"""The gated delta net in CUDA C++ against the daemon's torch block, on an NVIDIA GPU whose blocks work in clusters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.kernels.delta_layers import DEVICE, Layer, form_of, make_states, one_by_one, only_last

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or bool(torch.version.hip)
        or torch.cuda.get_device_capability()[0] not in (9, 10),
        reason="needs an NVIDIA GPU of sm_90 or sm_100",
    ),
]

from daemons.ops.cuda import delta_net  # noqa: E402
from daemons.ops.cuda.delta_net import CudaDeltaNet  # noqa: E402
from daemons.ops.triton_operations import TritonOperations  # noqa: E402


def kernel_of(a: Layer, dtype: torch.dtype) -> CudaDeltaNet:
    major, minor = torch.cuda.get_device_capability()
    return CudaDeltaNet(a.params, torch.device("cuda", 0), dtype, f"sm_{major}{minor}")


def run(kernel: CudaDeltaNet, a: Layer, y: Tensor, ids: list[int], kept: Tensor | None = None) -> Tensor:
    rows = only_last(ids, len(y) // len(ids)) if kept is None else kept
    out = kernel(y, a.pools, torch.tensor(ids, device=DEVICE), rows, a.params)
    make_states(a.pools, ids, rows, TritonOperations())
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n_key", "n_value"), [(16, 48), (16, 32), (4, 4)])
@pytest.mark.parametrize(("n", "ids"), [(1, [3]), (1, [6, 1, 4, 0, 3]), (3, [1, 0]), (16, [5])])
def test_outputs_and_states_are_those_of_the_torch_form(n_key, n_value, n, ids, dtype):
    a = Layer.random(n_key, n_value, 128, 4, (0.1, 8.0), 7)
    y = a.inputs(n * len(ids)).to(dtype)
    a.check(partial(run, kernel_of(a, dtype), a), y, ids, one_by_one(a.net), form_of(a.net))


@pytest.mark.parametrize("n", [1, 4, 16])
def test_a_slice_alone_gives_the_bits_of_one_among_others(n):
    a = Layer.random(16, 48, 128, 4, (0.1, 8.0), 2 + 2 * n)
    b, y, kernel = a.twin(), a.inputs(2 * n).bfloat16(), kernel_of(a, torch.bfloat16)
    kept = torch.arange(2, 2 + 2 * n, device=DEVICE).view(2, n)
    found = [run(kernel, a, y[i * n : (i + 1) * n], [i], kept[i : i + 1]) for i in range(2)]
    assert torch.equal(torch.cat(found), run(kernel, b, y, [0, 1], kept))
    assert torch.equal(a.states[kept], b.states[kept])
    assert torch.equal(a.conv_states[kept], b.conv_states[kept])


def test_several_tokens_give_the_bits_of_single_ones():
    a = Layer.random(16, 48, 128, 4, (0.1, 8.0), 6)
    b, y, kernel = a.twin(), a.inputs(4).bfloat16(), kernel_of(a, torch.bfloat16)
    found = run(kernel, a, y, [2], torch.tensor([[5, 2, 1, 4]], device=DEVICE))
    rows, at = [], 2
    for i, target in enumerate((5, 3, 1, 4)):
        rows.append(run(kernel, b, y[i : i + 1], [at], torch.tensor([[target]], device=DEVICE)))
        at = target
    assert torch.equal(found, torch.cat(rows))
    for ours, theirs in ((5, 5), (2, 3), (1, 1), (4, 4)):
        assert torch.equal(a.states[ours], b.states[theirs])
        assert torch.equal(a.conv_states[ours], b.conv_states[theirs])


@pytest.mark.parametrize(("n_key", "n_value"), [(16, 48), (16, 32), (4, 4)])
@pytest.mark.parametrize("n_slices", [6, 16, 33])
def test_many_slices_give_the_bits_of_few(n_key, n_value, n_slices, monkeypatch):
    a = Layer.random(n_key, n_value, 128, 4, (0.1, 8.0), n_slices + 2)
    b, y, kernel = a.twin(), a.inputs(n_slices).bfloat16(), kernel_of(a, torch.bfloat16)
    ids = torch.randperm(n_slices).tolist()
    rows = torch.tensor([[state] for state in ids], device=DEVICE)
    rows[0], rows[-1] = n_slices + 1, -1
    found = run(kernel, a, y, ids, rows)
    monkeypatch.setattr(delta_net, "MIN_BATCH", n_slices + 1)
    assert torch.equal(found, run(kernel, b, y, ids, rows))
    assert torch.equal(a.states, b.states)
    assert torch.equal(a.conv_states, b.conv_states)
