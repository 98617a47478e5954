"""Pieces of a stream join to the decoded whole, and none ends inside a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.text.detokenizer import Detokenizer
from lucevisor.text.tokenizer import Tokenizer
from tests.text.awkward import AWKWARD
from tests.text.vocabularies import demo_metadata

DEMO = Tokenizer.from_gguf(demo_metadata())
single_bytes = [i for i in range(DEMO.n_vocab) if len(DEMO.token_bytes(i)) == 1]


def stream(ids, visible=()):
    detokenizer = Detokenizer(DEMO, visible)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@given(
    st.lists(st.one_of(st.integers(0, DEMO.n_vocab - 1), st.sampled_from(single_bytes)), max_size=40),
    st.sets(st.integers(8182, 8191)),
)
@settings(max_examples=500, deadline=None)
def test_pieces_join_to_the_bytes_decoded_at_once(ids, visible):
    shown = [i for i in ids if i in visible or not DEMO.is_special(i)]
    whole = b"".join(map(DEMO.token_bytes, shown)).decode("utf-8", errors="replace")
    assert "".join(stream(ids, visible)) == whole


@pytest.mark.parametrize("text", AWKWARD)
def test_no_piece_ends_inside_a_character(text):
    ids = [i for character in text for i in DEMO.encode(character)]
    pieces = stream(ids)
    assert "".join(pieces) == "".join(DEMO.decode(DEMO.encode(character)) for character in text)
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_bytes_wait_for_the_rest_of_their_character():
    ids = [i for i in single_bytes if DEMO.token_bytes(i) in (b"\xe2", b"\x82", b"\xac")]
    ids.sort(key=lambda i: b"\xe2\x82\xac".index(DEMO.token_bytes(i)))
    assert stream(ids) == ["", "", "€", ""]
    assert stream(ids[:2]) == ["", "", "\ufffd"]


def test_control_tokens_show_only_if_asked():
    assert stream([8183, 8184]) == ["", "", ""]
    assert stream([8183, 8184], visible=[8184]) == ["", "<|im_end|>", ""]
    assert stream([8186]) == ["<think>", ""]
