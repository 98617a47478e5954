"""KV Flash, policy ``qk``, in every family: pages that come back are attended to, and the best ones are chosen."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from daemons.kv.batch import Group
from daemons.ops.page_scores import KeySketches, queries_by_head, scores_of
from daemons.ops.page_sums import TorchPageSums
from daemons.ops.paged import DensePages
from lucevisor.kv.residency import Residency
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from tests.combinations import combinations
from tests.families.golden import KINDS, Golden
from tests.families.paged_texts import Texts, masked, tokens_at
from tests.families.pipeline import How, load_stages

POOL = Residency(9, "qk")
CHUNKS = [256, 200, 120, 1, 60, 130, 3, 1, 1, 64]


def run(golden: Golden, texts: Texts, *, rank: bool) -> tuple[Tensor, dict[int, set[int]]]:
    """Logits of slices after each of which the pages are ranked at random, and what is out by the start of a slice."""
    rng, start, logits, out = random.Random(5), 0, [], {}
    for n in CHUNKS:
        logits.append(texts.run(a=tokens_at(start, n, golden.spec.vocabulary)))
        table = texts.tables[ord("a")]
        held = table.held(KvGroup.FULL)
        pages = range(-(-(start + n) // PAGE_TOKENS))
        out[start] = {e for growth in table.growths() for e in growth.paged_out if growth.kv_group is KvGroup.FULL}
        assert len(held) + len(out[start]) == len(pages)
        start += n
        if rank and table.ranks_next:
            scores = texts.scores[ord("a")] if texts.scores else []
            assert len(scores) == (start - n) // PAGE_TOKENS or not scores
            table.rank([rng.random() for _ in range(start // PAGE_TOKENS)])
    return torch.cat(logits), out


@combinations(indirect=["golden"], golden=KINDS, n_splits=[0, 2])
def test_swapped_pages_are_what_is_attended_to(golden: Golden, n_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = load_stages(golden.spec, golden.layer_splits()[:n_splits], How(host_pages=40, rank_pages=True))
    found, out = run(golden, Texts(golden.spec, stages, POOL), rank=True)
    left = [sorted(one) for one in out.values()]
    assert any(set(a) - set(b) for a, b in pairwise(left))  # some came back
    monkeypatch.setattr(Group, "keys", masked(out))
    expected, _ = run(golden, Texts(golden.spec, golden.whole, None), rank=False)
    assert float((found - expected).abs().max()) <= 2e-5 * float(expected.abs().max())


@pytest.mark.parametrize("width", [64, 60])
def test_scores_find_a_key_that_one_head_looks_for(width: int) -> None:
    """One of 64 keys of a page in a text of 40, and one of four heads attends to it: a mean would lose it."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for at in range(30, 36):
        keys = torch.randn(40, PAGE_TOKENS, 2, width, generator=generator) + 3 * torch.randn(width, generator=generator)
        q = torch.randn(3, 4, width, generator=generator)
        keys[at, 31, 1] += 12 * q[2, 3] / q[2, 3].norm()  # one key among 2,560: others reach 4 times their deviation
        sketches = KeySketches(30, 2, width, torch.device("cpu"))
        rows = torch.arange(0, 30)
        sketches.keep(keys[10:], rows)
        queries, pages = queries_by_head(q, 2, 0.125), DensePages(keys)
        of_all = TorchPageSums().of_keys(queries, pages, torch.arange(40))
        parts = (
            TorchPageSums().of_keys(queries, pages, torch.arange(10)),
            TorchPageSums().of_sketches(queries, sketches.kept, rows),
        )
        scores = scores_of(torch.cat(parts, dim=-1), 3)
        assert scores.shape == (40,)
        found.append(int(scores.argmax()) == at)
        torch.testing.assert_close(scores, scores_of(of_all, 3), rtol=0.1, atol=1e-4)  # those kept are rounded
    assert all(found)
