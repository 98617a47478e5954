"""The bound from bytes never exceeds the tokens that a text has, and is not far below them where it matters."""

from __future__ import annotations

import functools
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.text.token_bound import NFC_SHRINKS
from lucevisor.text.tokenizer import Segment, Tokenizer
from tests.text.awkward import AWKWARD
from tests.text.vocabularies import CONTROL, USER_DEFINED, byte_metadata, demo_metadata, gemma_metadata


@functools.cache
def tokenizers() -> dict[str, Tokenizer]:
    markers = {"<|im_end|>": CONTROL, "<|think|>": USER_DEFINED, "\n\n\n": USER_DEFINED}
    by_scheme = {pre: byte_metadata(pre, markers) for pre in ("qwen2", "qwen35", "llama-bpe", "laguna", "default")}
    return {
        name: Tokenizer.from_gguf(metadata)
        for name, metadata in {**by_scheme, "demo": demo_metadata(), "gemma": gemma_metadata()}.items()
    }


# Runs of what long tokens are made of, letters that NFC puts together, markers, halves of surrogate pairs.
pieces = st.one_of(
    st.builds(
        lambda unit, n: unit * n,
        st.sampled_from(
            [" ", "▁", "\n", "\t", "=", "-", "a", "the", "<|im_end|>", "<eos>", "\n\n\n", "日", "\ud800", "?", "\ufffd"]
        ),
        st.integers(1, 80),
    ),
    st.lists(
        st.sampled_from(
            ["\u1fbe", "\u0308", "\u0301", "\u212a", "\u1112", "\u1161", "\u11ab", "e", "\u1fef", "\u037e"]
        ),
        max_size=30,
    ).map("".join),
    st.sampled_from(AWKWARD),
    st.text(max_size=20),
)


@pytest.mark.parametrize("name", ["demo", "gemma", "qwen2", "qwen35", "llama-bpe", "laguna", "default"])
@given(runs=st.lists(st.tuples(pieces, st.booleans()), max_size=6))
@settings(max_examples=150, deadline=None)
def test_a_text_never_has_fewer_tokens(name, runs):
    tokenizer = tokenizers()[name]
    segments = [Segment(text, trusted) for text, trusted in runs]
    bound = tokenizer.bound.min_tokens("".join(text for text, _ in runs))
    assert bound <= len(tokenizer.encode_segments(segments))


@pytest.mark.parametrize("name", ["demo", "gemma", "llama-bpe"])
def test_every_token_alone_and_repeated(name):
    tokenizer = tokenizers()[name]
    for token_id in range(0, tokenizer.n_vocab, 5):
        text = tokenizer.decode([token_id], skip_special=False)
        for times in (1, 3):
            assert tokenizer.bound.min_tokens(text * times) <= len(tokenizer.encode(text * times, parse_special=True))


def test_how_far_nfc_shortens():
    """No character's longest spelling is longer than NFC_SHRINKS times what NFC writes for it."""
    composed = [c for c in map(chr, range(0x110000)) if unicodedata.decomposition(c) or "\uac00" <= c <= "\ud7a3"]
    apart = {c: unicodedata.normalize("NFD", c) for c in composed}
    longest: dict[str, int] = {}  # the most bytes of one character that stands for this one alone
    for c, parts in apart.items():
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, len(parts.encode())), len(c.encode()))
    for c, parts in (apart | {c: c for c in longest}).items():
        spelled = sum(longest.get(part, len(part.encode())) for part in parts)
        assert len(c.encode()) <= spelled
        if unicodedata.normalize("NFC", c) == c:
            assert spelled <= NFC_SHRINKS * len(c.encode()), hex(ord(c))


def test_where_it_matters():
    bound = tokenizers()["demo"].bound
    assert bound.max_token_bytes == 40
    assert bound.min_tokens("") == 0
    assert bound.min_tokens(" " * 4000) == 100
    assert bound.min_tokens("x" * 1_000_000) > 40_000
    assert bound.min_tokens("The quick brown fox. " * 50_000) >= 30_000
    assert bound.min_tokens("日" * 400_000) == 400_000 * 3 // (NFC_SHRINKS * 40)  # NFC: by bytes alone


def test_unknown_when_characters_are_fused():
    metadata = gemma_metadata()
    tokens = [t for t in metadata["tokenizer.ggml.tokens"] if t != "<0x41>"]
    kinds = [
        kind
        for kind, t in zip(metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.tokens"], strict=True)
        if t != "<0x41>"
    ]
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    assert Tokenizer.from_gguf({**metadata, **more}).bound.min_tokens("x" * 10_000) == 0
