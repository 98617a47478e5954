"""Ids equal those of the tokenizer the model was trained with; foreign text never becomes a control token."""

from __future__ import annotations

import functools
import itertools
import json
import unicodedata

import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from lucevisor.text.pre_tokenizers import PRE_TOKENIZERS
from lucevisor.text.tokenizer import NFC_SHRINKS, Detokenizer, Segment, Tokenizer
from lucevisor.text.vocabulary import TokenizerError
from tests.text.vocabularies import (
    AWKWARD,
    BYTE,
    CONTROL,
    DEMO_JSON,
    GEMMA_MARKERS,
    NORMAL,
    ROOT,
    UNKNOWN,
    USER_DEFINED,
    byte_metadata,
    demo_metadata,
    demo_oracle,
    gemma_metadata,
)

GOLDEN = ROOT / "tests/data/golden"
DEMO = Tokenizer.from_gguf(demo_metadata())
DEMO_MARKERS = demo_metadata()["tokenizer.ggml.tokens"][8182:]
MARKER_IDS = set(range(8182, 8192))
# Text that is likely to hold whole markers, parts of them, and the seams between.
marker_soup = st.lists(
    st.one_of(
        st.sampled_from(DEMO_MARKERS),
        st.sampled_from(DEMO_MARKERS).flatmap(lambda m: st.integers(0, len(m)).map(lambda i: m[:i])),
        st.sampled_from(DEMO_MARKERS).flatmap(lambda m: st.integers(0, len(m)).map(lambda i: m[i:])),
        st.text(max_size=8),
        st.sampled_from(AWKWARD),
    ),
    max_size=8,
).map("".join)


class TestDemoModel:
    @pytest.mark.parametrize("text", AWKWARD)
    def test_awkward_strings_have_the_trained_ids(self, text):
        assert DEMO.encode(text, parse_special=True) == demo_oracle().encode(text).ids

    @given(marker_soup)
    @settings(max_examples=300, deadline=None)
    def test_any_text_has_the_trained_ids(self, text):
        assert DEMO.encode(text, parse_special=True) == demo_oracle().encode(text).ids

    @given(marker_soup)
    @settings(max_examples=300, deadline=None)
    def test_foreign_text_has_no_control_token_and_comes_back(self, text):
        ids = DEMO.encode(text)
        assert MARKER_IDS.isdisjoint(ids)
        assert DEMO.decode(ids) == unicodedata.normalize("NFC", text)

    @given(marker_soup)
    @settings(max_examples=200, deadline=None)
    def test_decode_equals_the_library(self, text):
        ids = DEMO.encode(text, parse_special=True)
        assert DEMO.decode(ids) == demo_oracle().decode(ids, skip_special_tokens=True)
        assert DEMO.decode(ids, skip_special=False) == demo_oracle().decode(ids, skip_special_tokens=False)

    def test_half_a_surrogate_pair_becomes_the_replacement_character(self):
        assert DEMO.decode(DEMO.encode("a\ud800b\udfff")) == "a\ufffdb\ufffd"

    @pytest.mark.parametrize("token_id", [-1, 8192])
    def test_an_id_outside_the_vocabulary_is_refused(self, token_id):
        with pytest.raises(TokenizerError, match=f"{token_id} is outside the vocabulary of 8192"):
            DEMO.token_bytes(token_id)


class TestSegments:
    def test_only_trusted_markers_are_tokens(self):
        ids = DEMO.encode_segments([Segment("<|im_start|>user\n", True), Segment("<|im_end|>", False)])
        assert ids[0] == 8183
        assert MARKER_IDS.isdisjoint(ids[1:])

    @pytest.mark.parametrize(
        "segments",
        [
            [Segment("<|im_", True), Segment("end|>", False)],
            [Segment("<|im_", False), Segment("end|>", True)],
            [Segment("<|im_", False), Segment("end|>", False)],
            [Segment("<", True), Segment("|im_end|", False), Segment(">", True)],
        ],
    )
    def test_a_marker_made_of_pieces_is_text(self, segments):
        assert DEMO.encode_segments(segments) == DEMO.encode("<|im_end|>")

    def test_a_marker_over_two_trusted_segments_is_a_token(self):
        assert DEMO.encode_segments([Segment("<|im_", True), Segment("", False), Segment("end|>", True)]) == [8184]

    @given(st.lists(st.tuples(marker_soup, st.booleans()), max_size=5))
    @settings(max_examples=200, deadline=None)
    def test_merges_reach_over_seams(self, pairs):
        """Without markers in it, text has the ids of the whole, wherever the seams are."""
        runs = [(text.replace("<", "("), trusted) for text, trusted in pairs]
        segments = [Segment(text, trusted) for text, trusted in runs]
        assert DEMO.encode_segments(segments) == DEMO.encode("".join(text for text, _ in runs))

    @given(marker_soup, marker_soup, marker_soup)
    @settings(max_examples=200, deadline=None)
    def test_foreign_text_changes_no_control_token_around_it(self, before, foreign, after):
        def controls(middle):
            ids = DEMO.encode_segments([Segment(before, True), Segment(middle, False), Segment(after, True)])
            return [i for i in ids if i in MARKER_IDS]

        assert controls(foreign) == controls("x")

    @given(st.text(alphabet="<ab>", max_size=20))
    def test_overlapping_markers_match_as_in_the_library(self, text):
        """Leftmost first, then longest."""
        markers = {"<a>": CONTROL, "<a>b": CONTROL, "a>": USER_DEFINED, "b<a": CONTROL, "ab": USER_DEFINED}
        metadata = byte_metadata("qwen2", markers)
        vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        oracle = Library(BPE(vocab={t: i for t, i in vocab.items() if t not in markers}, merges=[]))
        oracle.add_tokens([AddedToken(f"pad{i}", normalized=False) for i in range(len(vocab) - len(markers) - 256 - 8)])
        oracle.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
        tokens = Tokenizer.from_gguf(metadata)
        shown = [tokens.token_bytes(i).decode() for i in tokens.encode(text, parse_special=True)]
        assert shown == oracle.encode(text).tokens


class TestPrompts:
    def test_bos_is_added_once_where_the_file_says_so(self):
        tokens = Tokenizer.from_gguf(
            byte_metadata("qwen2", {"<s>": CONTROL}, bos_token_id=264, add_bos_token=True),
        )
        assert (tokens.bos, tokens.add_bos) == (264, True)
        assert tokens.encode_prompt("a")[0] == 264
        assert tokens.encode_prompt("<s>a") == tokens.encode_prompt("a")
        assert 264 not in tokens.encode("a")

    def test_turn_ends_lie_after_the_blanks_behind_an_end_token(self):
        ids = DEMO.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>", parse_special=True)
        first, second = DEMO.turn_ends(ids)
        assert DEMO.decode(ids[:first], skip_special=False) == "<|im_start|>user\nhi<|im_end|>\n"
        assert second == len(ids)

    def test_blanks_that_text_follows_belong_to_that_text(self):
        ids = DEMO.encode("a<|im_end|>\nb", parse_special=True)
        assert DEMO.turn_ends(ids) == [ids.index(8184) + 1]


class TestGemma:
    TOKENS = Tokenizer.from_gguf(gemma_metadata())

    def oracle(self):
        """Transformers' own Gemma tokenizer, with the tokens that Gemma's tokenizer.json adds."""
        gemma = pytest.importorskip("transformers.models.gemma.tokenization_gemma")
        tokens = gemma_metadata()["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in gemma_metadata()["tokenizer.ggml.merges"]]
        oracle = gemma.GemmaTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, mask_token="<pad>")
        oracle.add_tokens([AddedToken("\n" * n, normalized=False) for n in (1, 2, 3)])
        oracle.add_tokens([AddedToken(marker, normalized=False) for marker in GEMMA_MARKERS])
        return oracle

    def test_awkward_strings_have_the_ids_of_transformers(self):
        oracle = self.oracle()
        for text in AWKWARD:
            expected = oracle.encode(text, add_special_tokens=False) if text else []
            assert self.TOKENS.encode(text, parse_special=True) == expected, text

    @given(text=st.text(alphabet="the cat\n  ▁<0x4>é日😀|turn", max_size=60))
    @settings(max_examples=200, deadline=None)
    def test_foreign_text_comes_back(self, text):
        ids = self.TOKENS.encode(text)
        assert not any(self.TOKENS.is_special(i) for i in ids)
        # U+2581 is Gemma's own sign for a space: it cannot be told from one.
        assert self.TOKENS.decode(ids) == text.replace("▁", " ")

    def test_markers_are_kept_apart_and_line_ends_found_whole(self):
        assert self.TOKENS.encode("<|turn>") != [self.TOKENS.token_id("<|turn>")]
        assert self.TOKENS.encode("<|turn>", parse_special=True) == [self.TOKENS.token_id("<|turn>")]
        assert [self.TOKENS.token_bytes(i) for i in self.TOKENS.encode("\n" * 5)] == [b"\n\n\n", b"\n\n"]

    def test_unknown_characters_are_bytes(self):
        assert [self.TOKENS.token_bytes(i) for i in self.TOKENS.encode("🦖")] == [b"\xf0", b"\x9f", b"\xa6", b"\x96"]

    def test_endings(self):
        texts = {self.TOKENS.token_bytes(i).decode() for i in self.TOKENS.eos_ids}
        assert texts == {"<eos>", "<turn|>"}  # `</s>` is an ordinary token here: struck-out text ends


class TestEndings:
    def test_every_known_ending_of_the_vocabulary_counts(self):
        markers = {"<|im_end|>": CONTROL, "<|endoftext|>": CONTROL, "</assistant>": USER_DEFINED, "<x>": CONTROL}
        tokens = Tokenizer.from_gguf(byte_metadata("laguna", markers, eot_token_id=267))
        assert tokens.eos_ids == {264, 265, 266, 267}
        assert tokens.is_special(266)

    def test_an_ordinary_token_is_no_ending(self):
        tokens = Tokenizer.from_gguf(byte_metadata("qwen2", {"<|im_end|>": NORMAL}))
        assert tokens.eos_ids == frozenset()


WITHOUT_VOCABULARY = {"bert", "gemma_embedding", "qwen3_embedding"}  # golden files of token ids alone


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(GOLDEN.glob("*/model.gguf")) if path.parent.name not in WITHOUT_VOCABULARY],
    ids=lambda path: path.parent.name,
)
def test_the_files_of_every_family_load(path):
    fields = GGUFReader(path).fields
    metadata = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer")}
    tokens = Tokenizer.from_gguf(metadata)
    assert tokens.n_vocab == 288
    assert tokens.eos_ids == {280, 282, 284}
    assert tokens.encode("<|im_end|>", parse_special=True) == [282]
    assert 282 not in tokens.encode("<|im_end|>")


@functools.cache
def lacking(*letters: str) -> Tokenizer:
    """A byte-level vocabulary without some of the byte letters."""
    metadata = byte_metadata("smollm", {})
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [f"no {token!r}" if token in letters else token for token in tokens]
    return Tokenizer.from_gguf(metadata)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"pre": "martian"}, r"tokenizer.ggml.pre = 'martian' is not known.*known are .*laguna.*qwen35"),
            ({"model": "t5"}, r"tokenizer.ggml.model = 't5' is not known; known are 'gpt2'"),
            ({"model": 3}, r"tokenizer.ggml.model is a int, must be a str"),
            ({"tokens": None}, r"tokenizer.ggml.tokens is a NoneType"),
            ({"tokens": ["a", 5]}, r"token_type has 265 entries, tokenizer.ggml.tokens has 2"),
            ({"merges": ["ab"]}, r"merges\[0\] = 'ab' is not two tokens"),
            ({"eos_token_id": 265}, r"eos_token_id = 265 is not a token: the vocabulary has 265"),
            ({"eos_token_id": -1}, r"eos_token_id = -1"),
            ({"add_bos_token": "yes"}, r"add_bos_token is a str, must be a bool"),
        ],
    )
    def test_the_key_is_named(self, change, message):
        metadata = byte_metadata("qwen2", {"<x>": CONTROL})
        metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.from_gguf(metadata)

    @pytest.mark.parametrize("key", ["tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
    def test_a_missing_key_is_named(self, key):
        metadata = byte_metadata("qwen2", {})
        del metadata[key]
        with pytest.raises(TokenizerError, match=f"the GGUF file has no {key}"):
            Tokenizer.from_gguf(metadata)

    def test_a_token_that_is_no_text(self):
        metadata = byte_metadata("qwen2", {})
        metadata["tokenizer.ggml.tokens"][7] = 7
        with pytest.raises(TokenizerError, match=r"tokens\[7\] is a int, must be text"):
            Tokenizer.from_gguf(metadata)

    def test_a_double_token_and_a_missing_byte_letter(self):
        metadata = byte_metadata("qwen2", {})
        metadata["tokenizer.ggml.tokens"][7] = metadata["tokenizer.ggml.tokens"][3]
        with pytest.raises(TokenizerError, match="3 and 7 are both"):
            Tokenizer.from_gguf(metadata)
        metadata["tokenizer.ggml.tokens"][7] = "something else"
        with pytest.raises(TokenizerError, match="lacks 1 byte letters of ASCII, such as "):
            Tokenizer.from_gguf(metadata)

    @given(st.text(alphabet=["a", " ", "t", "h", "e", "\x04", "\U00050000", "é"], max_size=30))
    def test_bytes_that_no_text_of_the_training_had_are_dropped(self, text):
        """SmolLM2 lacks six control characters and most bytes of no character; transformers drops them, too."""
        tokenizer = lacking("\u0104", "\xf1")
        ids, left = tokenizer.encode(text), text.encode().translate(None, b"\x04\xf1")
        assert b"".join(map(tokenizer.token_bytes, ids)) == left
        assert tokenizer.min_tokens(text) <= len(ids)

    def test_a_control_token_as_long_as_a_book(self):
        metadata = byte_metadata("qwen2", {"<" * 100_000: CONTROL})
        with pytest.raises(TokenizerError, match="a control token of 100000 characters"):
            Tokenizer.from_gguf(metadata)

    def test_a_merge_of_what_is_no_token_is_passed_over(self):
        metadata = byte_metadata("qwen2", {})
        metadata["tokenizer.ggml.merges"] = ["h e", "x yz", *metadata["tokenizer.ggml.merges"], "t h"]
        tokens = Tokenizer.from_gguf(metadata)
        assert [tokens.token_bytes(i) for i in tokens.encode("the xyz")] == [b"the", b" ", b"x", b"y", b"z"]

    def test_holes_and_unused_tokens_are_no_doubles(self):
        metadata = byte_metadata("qwen2", {})
        metadata["tokenizer.ggml.tokens"] += ["", "", "[PAD1]"]
        metadata["tokenizer.ggml.token_type"] += [1, 5, 5]
        assert Tokenizer.from_gguf(metadata).n_vocab == 267


# -- Detokenizer

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


# ---- Each scheme cuts text as the published tokenizer does


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


# ---- the bound from bytes


@functools.cache
def tokenizers() -> dict[str, Tokenizer]:
    markers = {"<|im_end|>": CONTROL, "<|think|>": USER_DEFINED, "\n\n\n": USER_DEFINED}
    by_scheme = {pre: byte_metadata(pre, markers) for pre in ("qwen2", "qwen35", "llama-bpe", "laguna", "default")}
    return {
        name: Tokenizer.from_gguf(metadata)
        for name, metadata in {**by_scheme, "demo": demo_metadata(), "gemma": gemma_metadata()}.items()
    }


# Runs of what long tokens are made of, letters that NFC puts together, markers, halves of surrogate pairs.
long_runs = st.one_of(
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
@given(runs=st.lists(st.tuples(long_runs, st.booleans()), max_size=6))
@settings(max_examples=150, deadline=None)
def test_a_text_never_has_fewer_tokens(name, runs):
    tokenizer = tokenizers()[name]
    segments = [Segment(text, trusted) for text, trusted in runs]
    bound = tokenizer.min_tokens("".join(text for text, _ in runs))
    assert bound <= len(tokenizer.encode_segments(segments))


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


def test_the_bound_is_near_the_number_of_tokens_of_long_texts():
    demo = tokenizers()["demo"]
    assert demo.min_tokens(" " * 4000) == 100
    assert demo.min_tokens("The quick brown fox. " * 50_000) >= 25_000


def test_unknown_when_characters_are_fused():
    metadata = gemma_metadata()
    tokens = [t for t in metadata["tokenizer.ggml.tokens"] if t != "<0x41>"]
    kinds = [
        kind
        for kind, t in zip(metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.tokens"], strict=True)
        if t != "<0x41>"
    ]
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    assert Tokenizer.from_gguf({**metadata, **more}).min_tokens("x" * 10_000) == 0


# ---- SentencePiece


def sentencepiece_metadata(scores: dict[str, float], **more: object) -> dict[str, object]:
    """A vocabulary with byte tokens, two markers and words with scores."""
    head = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "[INST]": CONTROL}
    head |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*head, *scores],
        "tokenizer.ggml.token_type": [*head.values(), *[NORMAL] * len(scores)],
        "tokenizer.ggml.scores": [0.0] * len(head) + list(scores.values()),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def joined_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's algorithm to the letter: the neighbours of the highest score, the leftmost of equal ones."""
    symbols = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


WITHOUT_PREFIX = Tokenizer.from_gguf(sentencepiece_metadata({"▁": -1.0, "a": -2.0}, add_space_prefix=False))


class TestSentencePiece:
    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.text("ab▁", min_size=2, max_size=5), unique=True, max_size=12).flatmap(
            lambda words: st.permutations(words)
        ),
        st.text("ab ", max_size=16),
    )
    def test_neighbours_are_joined_by_score(self, words, text):
        scores = {word: -float(rank) for rank, word in enumerate([*words, "a", "b", "▁"])}
        tokens = Tokenizer.from_gguf(sentencepiece_metadata(scores))
        found = [tokens.token_bytes(i).decode().replace(" ", "▁") for i in tokens.encode(text)]
        assert found == (joined_by_score("▁" + text.replace(" ", "▁"), scores) if text else [])
        assert tokens.decode(tokens.encode(text)) == text

    @given(st.text(max_size=20))
    def test_characters_without_a_token_are_their_bytes(self, text):
        tokens, text = WITHOUT_PREFIX, text.replace("▁", "")  # which is a space
        ids = tokens.encode(text)
        assert b"".join(map(tokens.token_bytes, ids)) == text.encode()
        assert tokens.decode(ids) == text

    def test_a_space_goes_before_a_text_and_behind_a_marker(self):
        tokens = Tokenizer.from_gguf(sentencepiece_metadata({"▁": -1.0, "a": -2.0, "▁a": -0.5}))
        found = tokens.encode_prompt("a[INST]a a")
        assert [tokens.token_bytes(i) for i in found] == [b"<s>", b" a", b"[INST]", b" a", b" a"]
        assert tokens.decode(found[1:2]) == "a"
        assert (tokens.bos, tokens.add_bos, tokens.eos_ids) == (1, True, {2})

    def test_struck_out_html_ends_nothing(self):
        metadata = sentencepiece_metadata({"▁": -1.0, "s": -2.0})
        metadata["tokenizer.ggml.token_type"][2] = USER_DEFINED
        metadata["tokenizer.ggml.eos_token_id"] = 1
        tokens = Tokenizer.from_gguf(metadata)
        assert tokens.eos_ids == {1}
        assert 2 in tokens.encode("x</s>")

    @pytest.mark.parametrize(
        ("scores", "reason"),
        [([0.0], "has 1 entries"), (None, "no tokenizer.ggml.scores"), ("nan", r"scores\[0\] = nan is not a number")],
    )
    def test_scores_that_are_none(self, scores, reason):
        metadata = sentencepiece_metadata({"a": -1.0})
        if scores == "nan":
            scores = [float("nan")] * len(metadata["tokenizer.ggml.tokens"])
        metadata["tokenizer.ggml.scores"] = scores
        if scores is None:
            del metadata["tokenizer.ggml.scores"]
        with pytest.raises(TokenizerError, match=reason):
            Tokenizer.from_gguf(metadata)
