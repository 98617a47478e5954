"""WordPiece vocabularies against the Hugging Face tokenizer, cased and not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Theirs
from tokenizers import models, normalizers, pre_tokenizers, processors

from lucevisor.text.tokenizer import Tokenizer
from lucevisor.text.vocabulary import TokenizerError, TokenType

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdehlnoprtuwé.,!'-日本"
WORDS = ["[unused1]", "hello", "the", "un", "##aff", "##able", "##ed", "pro", "##per", *LETTERS]
WORDS += [f"##{letter}" for letter in LETTERS if letter.isalpha()]
CAPITALS = ["Hello", "The", "##A", *"ABHT"]


def vocabulary(*, cased: bool) -> list[str]:
    return SPECIAL + WORDS + (CAPITALS if cased else [])


def metadata(words: list[str]) -> dict[str, object]:
    """As llama.cpp's converter writes it."""
    texts = [w if w in SPECIAL else w[2:] if w.startswith("##") else "▁" + w for w in words]
    names = {"padding": 0, "unknown": 1, "cls": 2, "seperator": 3, "mask": 4}
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [TokenType.CONTROL if w in SPECIAL else TokenType.NORMAL for w in words],
        **{f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in names.items()},
    }


def theirs(words: list[str], *, cased: bool) -> Theirs:
    made = Theirs(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(SPECIAL)
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


BOTH = {
    cased: (Tokenizer.from_gguf(metadata(vocabulary(cased=cased))), theirs(vocabulary(cased=cased), cased=cased))
    for cased in (False, True)
}
SOME = st.lists(st.sampled_from([*LETTERS, *"ABHTéÉ \t\n", "hello", "Unaffable", "[MASK]", "\u200b", "x"])).map("".join)


@given(SOME, st.booleans())
def test_ids_are_those_of_transformers(text, cased):
    ours, other = BOTH[cased]
    assert ours.encode_text(text) == other.encode(text).ids


def test_text_of_ids():
    ours, _ = BOTH[False]
    assert ours.decode(ours.encode_text("Hello unaffable")) == "hello unaffable"
    assert ours.encode_text("hello " * 50, max_tokens=9) == [2, *ours.encode("hello") * 7, 3]


def test_ids_that_the_file_does_not_name():
    words = vocabulary(cased=False)
    fields = {key: value for key, value in metadata(words).items() if not key.endswith("_id")}
    assert Tokenizer.from_gguf(fields).encode_text("hello %") == BOTH[False][0].encode_text("hello %")
    bos = Tokenizer.from_gguf(fields | {"tokenizer.ggml.bos_token_id": 4})
    assert bos.encode_text("hello")[0] == 4


def test_without_an_unknown_token():
    fields = metadata(["[?]" if word == "[UNK]" else word for word in vocabulary(cased=False)])
    del fields["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(TokenizerError, match="has no unknown token"):
        Tokenizer.from_gguf(fields)
