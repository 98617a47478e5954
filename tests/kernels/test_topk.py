"""Kernels that choose among logits and candidates choose as their torch forms do; of equal logits, the first."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from daemons.ops import topk as torch_forms
from daemons.ops.topk import Candidates
from daemons.ops.triton.topk import BLOCK, most_likely, select_path, top_k

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def shuffled(*shape: int) -> torch.Tensor:
    """Logits of which no two of a row are equal."""
    random = torch.Generator().manual_seed(shape[-1])
    rows = [torch.randperm(shape[-1], generator=random) for _ in range(torch.Size(shape[:-1]).numel())]
    return (torch.stack(rows).float() / 64 - 8).view(shape).to(DEVICE)


@pytest.mark.parametrize(("shape", "k"), [((3, 40), 5), ((2, 2, BLOCK + 1), 16), ((1, 3 * BLOCK - 7), 6)])
def test_the_best_logits(shape, k) -> None:
    logits = shuffled(*shape)
    best, tokens = top_k(logits, k)
    wanted, places = logits.topk(k, dim=-1)
    assert torch.equal(best, wanted)
    assert torch.equal(tokens, places)


def test_the_best_may_be_neighbours_in_half_precision() -> None:
    logits = torch.zeros(2, 2 * BLOCK, device=DEVICE)
    logits[:, 300:320] = torch.arange(20, device=DEVICE) / 4
    best, tokens = top_k(logits.half(), 16)
    assert tokens.tolist() == [[*range(319, 303, -1)]] * 2
    assert best.dtype == torch.float32
    assert best.tolist() == [[i / 4 for i in range(19, 3, -1)]] * 2
    assert torch.equal(most_likely(logits.half())[1], most_likely(logits)[1])


def test_of_equal_logits_the_first_is_the_best() -> None:
    logits = torch.full((1, 2 * BLOCK), -1.5, device=DEVICE)
    logits[0, [BLOCK + 3, 9, BLOCK - 1]] = 2.0
    logits[0, 5:7] = float("-inf")
    best, tokens = top_k(logits, 6)
    assert tokens.tolist() == [[9, BLOCK - 1, BLOCK + 3, 0, 1, 2]]
    assert best.tolist() == [[2.0, 2.0, 2.0, -1.5, -1.5, -1.5]]
    assert most_likely(logits)[0].tolist() == [9]


@pytest.mark.parametrize("shape", [(3, 40), (2, 2, BLOCK + 1), (1, 3 * BLOCK - 7)])
def test_the_likeliest_and_its_probability(shape) -> None:
    logits = shuffled(*shape)
    tokens, probabilities = most_likely(logits)
    wanted, exact = torch_forms.most_likely(logits.double())
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(probabilities.double(), exact, rtol=2e-5, atol=0)


@pytest.mark.parametrize(("n_slices", "n", "k", "rank"), [(1, 1, 2, 8), (2, 7, 16, 64), (3, 5, 6, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_path_along_candidates(dtype, n_slices, n, k, rank) -> None:
    random = torch.Generator().manual_seed(n * k)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(DEVICE, dtype)

    c = Candidates(
        best=normal(n_slices, n, k).float(),
        tokens=torch.randint(0, 10**6, (n_slices, n, k), generator=random).to(DEVICE),
        first=normal(n_slices, rank),
        before=normal(n_slices, n, k, rank),
        after=normal(n_slices, n, k, rank),
        gate=normal(n_slices, n, rank),
    )
    tokens, probabilities = select_path(c)
    exact = Candidates(*(x.double() if x.is_floating_point() else x for x in c))
    wanted, chances = torch_forms.select_path(exact)
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(probabilities.double(), chances, rtol=2e-5, atol=1e-6)
