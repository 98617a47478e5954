"""Each scheme cuts text as the published tokenizer does."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Library

from lucevisor.text.pre_tokenizers import PRE_TOKENIZERS
from lucevisor.text.tokenizer import Tokenizer
from tests.text.awkward import AWKWARD
from tests.text.vocabularies import DEMO_JSON, byte_metadata, demo_metadata


def pieces(pre: str, text: str) -> list[str]:
    """The pieces that merges cannot leave, as text."""
    return [text[start:stop] for _, (start, stop) in PRE_TOKENIZERS[pre].pre_tokenizer().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "don't  stop 1234!\n", ["don", "'t", " ", " stop", " 1234", "!", "\n"]),
        ("gpt-2", "DON'T", ["DON", "'", "T"]),
        ("smollm", "x 1234", ["x", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "DON'T 1234567 x=1;\n\n y", ["DON", "'T", " ", "123", "456", "7", " x", "=", "1", ";\n\n", " y"]),
        ("qwen2", "I'm at 1234,\n  x\t y", ["I", "'m", " at", " ", "1", "2", "3", "4", ",\n", " ", " x", "\t", " y"]),
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
        ("qwen35", "हिन्दी", ["हिन्दी"]),
        ("qwen35", "q\u0307\u0323x", ["q\u0307\u0323x"]),
        ("gpt-4o", "HelloWorld's 1234/\n", ["Hello", "World's", " ", "123", "4", "/\n"]),
        ("laguna", "a\r\n\r\n  b 12", ["a", "\r\n\r\n", " ", " b", " ", "1", "2"]),
        ("laguna", "a,\n\nb", ["a", ",", "\n\n", "b"]),
        ("laguna", "a\n\rb", ["a", "\n\r", "b"]),
        ("qwen2", "a,\n\nb", ["a", ",\n\n", "b"]),
        ("default", "a 12345 (x)", ["a", " ", "123", "45", " ", "(", "x", ")"]),
    ],
)
def test_cuts(pre, text, expected):
    assert pieces(pre, text) == expected


@pytest.mark.parametrize(
    ("pre", "module", "name"),
    [
        ("qwen2", "qwen2.tokenization_qwen2", "Qwen2Tokenizer"),
        ("qwen35", "qwen3_5.tokenization_qwen3_5", "Qwen3_5Tokenizer"),
        ("gpt-2", "gpt2.tokenization_gpt2", "GPT2Tokenizer"),
    ],
)
def test_ids_equal_those_of_transformers(pre, module, name):
    transformers = pytest.importorskip(f"transformers.models.{module}")
    metadata = {**demo_metadata(), "tokenizer.ggml.pre": pre}
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"][:8182])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    oracle = getattr(transformers, name)(vocab=vocab, merges=merges)
    tokens = Tokenizer.from_gguf(metadata)
    for text in AWKWARD:
        # The class makes <|endoftext|> a token; to us it is foreign text here.
        plain = text.replace("<|endoftext|>", "")
        expected = oracle.encode(plain, add_special_tokens=False) if plain else []
        assert tokens.encode(plain) == expected, text


def test_laguna_equals_a_tokenizer_made_from_its_published_pipeline():
    """The pre-tokenizer section of Laguna's tokenizer.json, no normaliser, with the demo's merges."""
    published = json.loads(DEMO_JSON.read_text())
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    published["normalizer"] = None
    published["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": "(?:\\r?\\n)+(?!\\r?\\n)"},
                "behavior": "MergedWithNext",
                "invert": False,
            },
            {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    oracle = Library.from_str(json.dumps(published))
    tokens = Tokenizer.from_gguf({**demo_metadata(), "tokenizer.ggml.pre": "laguna"})
    for text in AWKWARD:
        assert tokens.encode(text, parse_special=True) == oracle.encode(text).ids, text


def test_a_whole_piece_that_is_a_token_needs_no_merges_for_llama():
    """`ignore_merges`: the word is in the vocabulary, but no merge leads to it."""
    metadata = byte_metadata("llama-bpe", {"hello": 1})
    assert Tokenizer.from_gguf(metadata).encode("hello") == [264]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(Tokenizer.from_gguf(metadata).encode("hello")) == 5


def test_decomposed_accents_are_composed_for_qwen_and_left_alone_for_laguna():
    decomposed = "e\u0301"
    for pre, back in (("qwen2", "é"), ("qwen35", "é"), ("laguna", decomposed), ("llama-bpe", decomposed)):
        tokens = Tokenizer.from_gguf(byte_metadata(pre, {}))
        assert tokens.decode(tokens.encode(decomposed)) == back


def test_a_file_that_names_no_pre_tokenizer_gets_the_default():
    metadata = byte_metadata("default", {})
    expected = Tokenizer.from_gguf(metadata).encode("12345 the")
    del metadata["tokenizer.ggml.pre"]
    assert Tokenizer.from_gguf(metadata).encode("12345 the") == expected
