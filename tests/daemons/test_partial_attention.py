"""Parts of attention, merged by the log of the sum of their weights, are attention over all keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daemons.ops.attention import reference, visible
from daemons.ops.partial_attention import Partial, merged, partial_attention


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    st.sampled_from([0.0, 3.0]),
    st.floats(0.05, 30.0),
)
def test_parts_merge_to_the_whole(lengths, n, heads, softcap, scale) -> None:
    n_heads, n_kv_heads = heads
    length = sum(lengths) + n
    q, k, v = random(2, n, n_heads, 8), random(2, length, n_kv_heads, 8), random(2, length, n_kv_heads, 5)
    mask = visible(torch.arange(length - n, length)[None], torch.arange(length)[None], 0).expand(2, -1, -1, -1)
    how = {"scale": scale, "softcap": softcap}
    whole = partial_attention(q, k[:, -n:], v[:, -n:], mask[..., -n:], **how)
    start, parts = 0, []
    for size in lengths:
        parts.append(partial_attention(q, k[:, start : start + size], v[:, start : start + size], None, **how))
        start += size
    together = merged(
        torch.stack([whole.values, *(p.values for p in parts)]), torch.stack([whole.sums, *(p.sums for p in parts)])
    )
    for part in parts:
        whole.add(part)
    expected = reference(q, k, v, mask, **how)
    most = 4 + scale * q.norm(dim=-1).max() * k.norm(dim=-1).max()  # of a score, whose rounding a weight multiplies
    allowed = torch.finfo(torch.float32).eps * float(most * v.abs().max())
    for found in (whole, together):
        torch.testing.assert_close(found.values, expected, rtol=0, atol=allowed)


def test_a_part_whose_weights_are_nothing_beside_the_others_changes_nothing() -> None:
    one = Partial(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    one.add(Partial(torch.full((1, 1, 1, 2), 7.0), torch.full((1, 1, 1), -1.0e30)))
    assert one.values.tolist() == [[[[1.0, 1.0]]]]
    assert one.sums.item() == 0.0


@pytest.mark.parametrize(("n", "causal"), [(1, True), (3, True), (40, False)])
def test_the_kernel_puts_out_parts(n: int, causal: bool) -> None:
    pytest.importorskip("triton")
    from daemons.ops.operations import PagedQuery
    from daemons.ops.paged import DensePages
    from daemons.ops.triton_operations import TritonOperations

    k, v = random(4, 64, 2, 16), random(4, 64, 2, 16).roll(1, 0)
    q, length = random(1, n, 4, 16), 256
    attend = TritonOperations().partial_attention(scale=0.25, softcap=0.0)
    assert attend is not None
    tables = torch.arange(4, dtype=torch.int32).unsqueeze(0)
    starts = torch.tensor([length - n])
    where = PagedQuery(tables, torch.zeros(1, dtype=torch.int64), starts, n, length)
    found = attend(q.flatten(0, 1), DensePages(k), DensePages(v), where, causal)
    mask = visible(torch.arange(length - n, length)[None], torch.arange(length)[None], 0) if causal else None
    wanted = partial_attention(q, k.flatten(0, 1)[None], v.flatten(0, 1)[None], mask, scale=0.25)
    torch.testing.assert_close(found.values, wanted.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.sums, wanted.sums, rtol=1e-5, atol=1e-5)
