"""Packed token ids against plain lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.kv.tokens import PAGE_BYTES, TokenBuffer
from lucevisor.model.values import PAGE_TOKENS

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(IDS, st.integers(-50, 50), st.integers(-50, 50))
def test_a_buffer_is_a_sequence(ids: list[int], start: int, stop: int) -> None:
    buffer = TokenBuffer(ids)
    assert len(buffer) == len(ids)
    assert list(buffer) == ids
    assert buffer == ids
    assert buffer[start:stop] == ids[start:stop]
    assert buffer != [*ids, 1]
    assert TokenBuffer.from_packed(buffer.packed()) == buffer
    assert buffer.packed(2, 5) == b"".join(token.to_bytes(4, "little") for token in ids[2:5])


def test_a_copy_grows_alone() -> None:
    one = TokenBuffer([1, 2])
    two = TokenBuffer(one)
    two.append(3)
    assert (one, two, two[2]) == ([1, 2], [1, 2, 3], 3)
    assert TokenBuffer.of(one) is one
    with pytest.raises(OverflowError):
        two.append(2**32)


@given(IDS, IDS, IDS, st.integers(0, 60))
def test_common_tokens(same: list[int], one: list[int], other: list[int], most: int) -> None:
    one, other = [*same, *one], [*same, *other]
    n = 0
    while n < min(len(one), len(other), most) and one[n] == other[n]:
        n += 1
    assert TokenBuffer(one).n_common(TokenBuffer(other), most) == n


@pytest.mark.parametrize("n_pages", [1, 2, 7])
def test_common_pages(n_pages: int) -> None:
    ids = TokenBuffer(range(9 * PAGE_TOKENS + 5))
    for changed in range(n_pages * PAGE_TOKENS):
        other = [*range(2 * PAGE_TOKENS, (2 + n_pages) * PAGE_TOKENS)]
        other[changed] = 10**9
        pages = TokenBuffer(other).packed()
        assert len(pages) == n_pages * PAGE_BYTES
        if changed >= PAGE_TOKENS:  # the first page is the key by which a node was found
            assert ids.n_common_pages(pages, 2, n_pages) == changed // PAGE_TOKENS
    same = ids.packed(2 * PAGE_TOKENS, 9 * PAGE_TOKENS)
    assert ids.n_common_pages(same, 2, n_pages) == n_pages


def test_texts_with_different_adapters_have_nothing_in_common() -> None:
    plain, adapted = TokenBuffer([1, 2, 3]), TokenBuffer([1, 2, 3], "a")
    assert plain != adapted == TokenBuffer(adapted) == TokenBuffer.from_packed(adapted.packed(), "a")
    assert TokenBuffer(adapted, "b").adapter == "b"
    assert (plain.n_common(adapted, 3), adapted.n_common(TokenBuffer(adapted), 3)) == (0, 3)
