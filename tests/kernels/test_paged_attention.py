"""Paged attention against gathered pages and the reference.

Everything a kernel may not read is NaN: free pages, positions of a page before the window or after the last token, and
the page before the pool, where a table entry NO_PAGE points.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from daemons.kv.sequences import NO_PAGE
from daemons.ops.attention import reference, visible
from daemons.ops.operations import SHORT_SLICE
from daemons.ops.paged import DensePages, PagedTensor, Pages, Q8Pages
from lucevisor.model.values import PAGE_TOKENS
from tests.kernels.limits import assert_near

pytest.importorskip("triton")

from daemons.ops.triton.paged_attention import choose_n_splits, paged_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


@dataclass(frozen=True)
class Problem:
    """Slices of ``n`` tokens that end at ``lengths``; ``kv``: dtype of the pages, None for q8_0; ``lows``: the first
    position that each sees.
    """

    lengths: tuple[int, ...]
    n: int = 1
    group: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    window: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    kv: torch.dtype | None = torch.float32
    value_dim: int = 0  # 0: as keys
    causal: bool = True
    lows: tuple[int, ...] = ()
    sinks: bool = False

    @property
    def starts(self) -> list[int]:
        return [length - self.n for length in self.lengths]


class Scene:
    """Queries, pools of NaN except for what the slices see, and scrambled tables."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        generator = torch.Generator().manual_seed(sum(p.lengths) + 7 * p.n + p.group)
        self.q = torch.randn(
            len(p.lengths) * p.n, p.n_kv_heads * p.group, p.head_dim, generator=generator, dtype=torch.float32
        )
        self.q = self.q.to(DEVICE, p.dtype)
        counts = [-(-length // PAGE_TOKENS) for length in p.lengths]
        free = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        self.keys, self.values = (self.pool(len(free), d) for d in (p.head_dim, p.value_dim or p.head_dim))
        order = torch.randperm(len(counts) + 2, generator=generator)[: len(counts)]
        self.tables = torch.full((len(counts) + 2, max(counts) + 3), NO_PAGE, dtype=torch.int32)
        self.table_rows = order.to(DEVICE)
        n_heads = p.n_kv_heads * p.group
        self.sinks = torch.linspace(-3, 3, n_heads, device=DEVICE) if p.sinks else None
        self.lows = torch.tensor(p.lows, device=DEVICE) if p.lows else None
        lows = p.lows or (0,) * len(counts)
        for row, start, length, count, low in zip(order.tolist(), p.starts, p.lengths, counts, lows, strict=True):
            if p.window:
                low = max(low, start - p.window + 1)
            pages = torch.tensor([free.pop() for _ in range(count - low // PAGE_TOKENS)])
            self.tables[row, low // PAGE_TOKENS : count] = pages
            at = torch.arange(low, length)
            slots = (self.tables[row].long()[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS).to(DEVICE)
            for pool, d in ((self.keys, p.head_dim), (self.values, p.value_dim or p.head_dim)):
                rows = torch.randn(len(at), p.n_kv_heads, d, generator=generator)
                pool.write(slots, rows.to(DEVICE))
        self.tables = self.tables.to(DEVICE)
        self.starts = torch.tensor(p.starts, device=DEVICE)

    def pool(self, n_pages: int, d: int) -> PagedTensor:
        shape = (n_pages + 1, PAGE_TOKENS, self.p.n_kv_heads)  # the page before page 0 does not exist
        if self.p.kv is not None:
            return DensePages(torch.full((*shape, d), float("nan"), dtype=self.p.kv, device=DEVICE)[1:])
        groups = -(-d // 32)
        codes = torch.full((*shape, groups * 32), 99, dtype=torch.int8, device=DEVICE)
        return Q8Pages(codes[1:], torch.full((*shape, groups), float("nan"), dtype=torch.float16, device=DEVICE)[1:], d)

    def found(self, n_splits: int | None = None, q: Tensor | None = None) -> Tensor:
        p = self.p
        return paged_attention(
            self.q if q is None else q,
            self.keys,
            self.values,
            self.tables,
            self.table_rows,
            self.starts,
            p.n,
            window=p.window,
            scale=0.3,
            softcap=p.softcap,
            max_length=max(p.lengths),
            causal=p.causal,
            lows=self.lows,
            n_splits=n_splits,
            sinks=self.sinks,
        )

    def assert_near(self, found: Tensor) -> None:
        """To gather and reference, slice by slice, with what is hidden set to zero.  The kernel rounds the softmax to
        the queries' dtype, which weighs values, and the result.
        """
        p = self.p
        for b, (start, length) in enumerate(zip(p.starts, p.lengths, strict=True)):
            index = self.tables[self.table_rows[b]].long().clamp_(min=0)[: -(-length // PAGE_TOKENS)]
            pages = Pages(index, 1, 0, length)
            k, v = (pool.read(pages, p.dtype).float().nan_to_num_() for pool in (self.keys, self.values))
            positions = torch.arange(length, device=DEVICE)
            rows = slice(b * p.n, (b + 1) * p.n)
            lows = None if self.lows is None else self.lows[b : b + 1]
            mask = visible(positions[None, start:], positions[None], p.window, p.causal, lows)
            form = partial(reference, mask=mask, scale=0.3, softcap=p.softcap, sinks=self.sinks)
            assert_near(found[rows][None], form, self.q[rows][None], k, v, rounded=float(v.abs().max()))

    def check(self, n_splits: int | None = None, q: Tensor | None = None) -> None:
        found = self.found(n_splits, q)
        assert found.dtype == self.p.dtype
        assert found.is_contiguous()
        self.assert_near(found)


@pytest.mark.parametrize("n_splits", [1, 3])
@pytest.mark.parametrize("window", [0, 20])
def test_sinks(n_splits: int, window: int) -> None:
    Scene(Problem((1, 64, 300), window=window, sinks=True)).check(n_splits)
    Scene(Problem((5, 65, 130), 5, 3, n_kv_heads=2, window=window, sinks=True)).check(n_splits)


DECODE = Problem((1, 64, 65, 300))


@pytest.mark.parametrize("n_splits", [1, 3, None])
def test_decode_around_page_boundaries(n_splits: int | None) -> None:
    Scene(DECODE).check(n_splits)


@pytest.mark.parametrize("dtype", KINDS[1:])
@pytest.mark.parametrize("n_splits", [1, 2])
def test_half_precision_activations_and_pages(dtype: torch.dtype, n_splits: int) -> None:
    Scene(replace(DECODE, group=6, n_kv_heads=1, dtype=dtype, kv=dtype)).check(n_splits)


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_empty_splits(length: int) -> None:
    Scene(Problem((length,), n_kv_heads=1)).check(6)


def test_more_splits_than_one_merge_holds() -> None:
    Scene(Problem((2100,), group=8, n_kv_heads=1)).check(100)


@pytest.mark.parametrize(("group", "n"), [(1, 16), (4, 2), (6, 5), (8, 3), (2, SHORT_SLICE)])
def test_short_slices(group: int, n: int) -> None:
    Scene(Problem((n, 64 + n // 2, 150), n, group, n_kv_heads=1)).check(2)


@pytest.mark.parametrize("dtype", KINDS)
def test_more_query_rows_than_a_tile(dtype: torch.dtype) -> None:
    Scene(Problem((70,), 11, 6, n_kv_heads=1, dtype=dtype, kv=dtype)).check(2)
    Scene(Problem((16, 130), 16, 16, n_kv_heads=1, dtype=dtype, kv=dtype)).check(1)


@pytest.mark.parametrize("window", [1, 20, 64, 65, 129])
@pytest.mark.parametrize("n", [1, 4])
def test_pages_before_the_window_are_never_read(window: int, n: int) -> None:
    Scene(Problem((n, 192, 257), n, 2, n_kv_heads=1, window=window)).check(2)


@pytest.mark.parametrize("window", [0, 20, 129])
@pytest.mark.parametrize(("causal", "lows"), [(False, ()), (True, (0, 64, 100)), (False, (0, 63, 186))])
def test_drafts_see_each_other_and_nothing_before_the_drafters_state(
    causal: bool, lows: tuple[int, ...], window: int
) -> None:
    problem = Problem((8, 192, 257), 8, 4, n_kv_heads=1, window=window, causal=causal, lows=lows)
    for n_splits in (1, 3):
        Scene(problem).check(n_splits)


def test_one_token_that_sees_itself_alone() -> None:
    Scene(Problem((1, 65, 128), lows=(0, 64, 127))).check(2)


def test_soft_cap() -> None:
    scene = Scene(Problem((65, 130), softcap=5.0))
    scene.q *= 20.0
    scene.check(2)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("n", [1, 3])
def test_pages_of_q8_0(dtype: torch.dtype, n: int) -> None:
    Scene(Problem((n, 65, 130), n, 3, dtype=dtype, kv=None)).check(2)


@pytest.mark.parametrize("kv", [torch.float16, None])
def test_head_dims_other_than_powers_of_two(kv: torch.dtype | None) -> None:
    Scene(Problem((70,), 3, 3, n_kv_heads=3, head_dim=80, kv=kv)).check(2)
    Scene(Problem((70,), 1, 2, head_dim=48, value_dim=24, kv=kv)).check(2)


@pytest.mark.parametrize("kv", [torch.float16, None])
@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_large_heads(head_dim: int, kv: torch.dtype | None) -> None:
    Scene(Problem((70,), 2, 3, n_kv_heads=1, head_dim=head_dim, dtype=torch.float16, kv=kv)).check(2)


@pytest.mark.parametrize(("dtype", "kv"), [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_pages_of_another_dtype_than_the_queries(dtype: torch.dtype, kv: torch.dtype) -> None:
    Scene(Problem((65, 130), dtype=dtype, kv=kv)).check(2)


def test_strided_queries() -> None:
    scene = Scene(Problem((9, 80), 3, 3))
    wide = torch.full((6, 3 * 6, 64), float("nan"), device=DEVICE)
    wide[:, 1:13:2] = scene.q
    scene.check(2, wide[:, 1:13:2])


def test_number_of_splits() -> None:
    assert choose_n_splits(8, 50_000, 132) == 33
    assert choose_n_splits(8, 1000, 132) == 8  # not worth more
    assert choose_n_splits(1000, 2000, 132) == 1
    assert choose_n_splits(1000, 20_000, 132) == 10  # one long slice among a thousand
    assert choose_n_splits(3, 1, 132) == 1


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="torch sees no GPU")
def test_a_graph_follows_lengths_on_the_device() -> None:
    scene, other = Scene(replace(DECODE, lengths=(300, 300, 300, 300))), Scene(DECODE)
    scene.found(5)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scene.found(5)
    for name in ("q", "starts", "table_rows"):
        getattr(scene, name).copy_(getattr(other, name))
    scene.tables[:, : other.tables.shape[1]] = other.tables
    n_pages = other.keys.slots.shape[0]
    scene.keys.slots[:n_pages] = other.keys.slots
    scene.values.slots[:n_pages] = other.values.slots
    graph.replay()
    other.assert_near(out)
