"""Tokenizer: byte-pair encoding between strings and token ids, built from the metadata of a GGUF file.

The BPE core has no control tokens. `encode_segments` looks for markers (control and user-defined tokens, leftmost and
longest first) in trusted runs only, and passes everything between to the core in one piece, so that merges cross the
boundary between template and message as in training."""

from __future__ import annotations

import codecs
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BpeCore

from lucevisor.text.pre_tokenizers import (
    PRE_TOKENIZERS,
    SENTENCEPIECE_SPEC,
    WORDPIECE_SPEC,
    Normalization,
    PreTokenizerSpec,
)
from lucevisor.text.vocabulary import (
    MODEL_KEY,
    PRE_KEY,
    SENTENCEPIECE,
    TOKENS_KEY,
    WORDPIECE,
    TokenizerError,
    TokenType,
    Vocabulary,
    require,
)


def merges_of_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all merges of tokens into tokens, by descending score of the result; of one token, the longest left first.
    SentencePiece joins the neighbours whose token has the highest score, which gives the same."""
    merges = [
        (-score, -at, token)
        for token, score in scores.items()
        for at in range(1, len(token))
        if token[:at] in scores and token[at:] in scores
    ]
    merges.sort(key=lambda merge: merge[:2])  # equal ones in the order of the vocabulary
    return [(token[:-at], token[-at:]) for _, at, token in merges]


NFC_SHRINKS: Final = 4
"""Bytes of a text for one byte of its NFC: U+1FBE U+0308 U+0301 is U+0390, 7 bytes for 2."""
SURROGATES: Final = re.compile("[\ud800-\udfff]")
"""JSON may carry half of a surrogate pair; no UTF-8 holds it, and it is tokenised as U+FFFD."""
MAX_BREAKER_SEQUENCES: Final = 16384
"""Token sequences of all sequence breakers of a request."""
_MARKER_TYPES: Final = frozenset([TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED])
_HIDDEN_TYPES: Final = frozenset([TokenType.CONTROL, TokenType.UNKNOWN])
_NEEDED: Final = frozenset(string.digits + string.ascii_letters + string.punctuation + " \n")
"""Characters that every byte-level vocabulary can write."""
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Segment:
    """A run of text; markers are control tokens in trusted text (the template's own), plain text elsewhere."""

    text: str
    trusted: bool


class Tokenizer:
    """The tokenizer of one model: `n_vocab` tokens, `eos_ids` that end a generation, `bos` or None."""

    def __init__(self, vocabulary: Vocabulary, scheme: PreTokenizerSpec) -> None:
        self._vocabulary = vocabulary
        self._scheme = scheme
        self._bytes = _token_bytes(vocabulary, scheme)
        self._core = _build_core(vocabulary, scheme)
        markers = {
            text: token_id
            for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
            if text and kind in _MARKER_TYPES and not _is_plain(text, kind, scheme)
        }
        self._markers: Mapping[str, int] = markers
        self._marker_pattern = _any_of(markers)
        self.markers = tuple(sorted(markers, key=len, reverse=True))  # texts, the longest first
        self.n_vocab = len(vocabulary.tokens)
        self.eos_ids = vocabulary.eos_ids
        self.bos = vocabulary.bos
        add_bos = scheme.add_bos if vocabulary.add_bos is None else vocabulary.add_bos
        self.add_bos = add_bos and vocabulary.bos is not None
        self._end = [] if vocabulary.end is None else [vocabulary.end]

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build the tokenizer from GGUF metadata; takes 1 to 2 s for 262,144 tokens.  Raises TokenizerError."""
        return cls(Vocabulary.from_gguf(metadata), _scheme(metadata))

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Return the ids of a text, without BOS; `parse_special` turns markers into control tokens."""
        return self.encode_segments([Segment(text, parse_special)])

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a raw prompt: markers are control tokens, and BOS is added if the file says so."""
        ids = self.encode(text, parse_special=True)
        if self.add_bos and self.bos is not None and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids

    def encode_text(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a text to pool: as of a raw prompt, with an end token if the file says so, ``max_tokens``
        at most."""
        ids = self.encode_prompt(text)
        if max_tokens is not None and len(ids) + len(self._end) > max_tokens:
            ids = ids[: max(0, max_tokens - len(self._end))]
        return ids if ids[-1:] == self._end else ids + self._end

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the ids of two texts that an encoder compares; markers in them are plain text."""
        starts = [self.bos] if self.add_bos and self.bos is not None else []
        return [*starts, *self.encode(first), *self._end, *self.encode(second), *self._end]

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Return the ids of the joined segments; markers whose characters are all trusted become control tokens."""
        runs = [segment for segment in segments if segment.text]
        text = "".join(segment.text for segment in runs)
        ids: list[int] = []
        done = 0
        for start, stop in _trusted_ranges(runs):
            for match in self._marker_pattern.finditer(text, start, stop):
                ids += self._merge(text[done : match.start()])
                ids.append(self._markers[match.group()])
                done = match.end()
        return ids + self._merge(text[done:])

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that a text certainly has, from its bytes; 0 where unknown characters are fused or
        dropped."""
        most = self.max_token_bytes
        if self._scheme.normal is Normalization.NFC and not text.isascii():
            most *= NFC_SHRINKS
        return -(-len(text.encode("utf-8", "surrogatepass")) // most) if most else 0

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of a text that one token stands for at most; 0: unknown."""
        tokens, types = self._vocabulary.tokens, self._vocabulary.types
        if self._scheme.wordpiece:  # a long word is one unknown token
            return 0
        needed = set(map(chr, _byte_alphabet())) if self._scheme.byte_level else {f"<0x{i:02X}>" for i in range(256)}
        unusable = (TokenType.CONTROL, TokenType.UNUSED)
        if not needed <= {text for text, kind in zip(tokens, types, strict=True) if kind not in unusable}:
            return 0
        shown = [text for text, kind in zip(tokens, types, strict=True) if kind != TokenType.NORMAL or "▁" in text]
        return max(len(raw) for raw in (*self._bytes, *(text.encode("utf-8", "replace") for text in shown)))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of ids, by default without control tokens, and without a space that `encode` adds; invalid
        UTF-8 becomes U+FFFD."""
        ids = list(ids)
        shown = (i for i in ids if not (skip_special and self.is_special(i)))
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", errors="replace")
        prefixed = self._scheme.prefix_space and bool(ids) and (skip_special or not self.is_marker(ids[0]))
        return text.removeprefix(" ") if prefixed else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; for a control token, its name in UTF-8."""
        if not 0 <= token_id < self.n_vocab:
            raise TokenizerError(f"token id {token_id} is outside the vocabulary of {self.n_vocab} tokens")
        return self._bytes[token_id]

    def token_id(self, marker: str) -> int | None:
        """Return the id of a control or user-defined token by its text, or None."""
        return self._markers.get(marker)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is a control token, which clients do not see."""
        self.token_bytes(token_id)
        return self._vocabulary.types[token_id] in _HIDDEN_TYPES

    def is_text(self, token_id: int) -> bool:
        """Return whether a token is ordinary text: no marker, and in use."""
        unused = self._vocabulary.types[token_id] == TokenType.UNUSED
        return bool(self._bytes[token_id]) and not unused and not self.is_marker(token_id)

    def is_marker(self, token_id: int) -> bool:
        return self._vocabulary.tokens[token_id] in self._markers

    def turn_ends(self, ids: Sequence[int]) -> list[int]:
        """Return the offsets at which messages are complete: a continued chat has the same ids up to each."""
        ends = []
        for index, token_id in enumerate(ids):
            if token_id in self._vocabulary.turn_end_ids and token_id != self.bos:
                end = index + 1
                while end < len(ids) and not self.is_marker(ids[end]) and self._bytes[ids[end]].isspace():
                    end += 1
                # Whitespace before ordinary text belongs to it: the next message may merge it differently.
                ends.append(end if end == len(ids) or self.is_marker(ids[end]) else index + 1)
        return ends

    def _merge(self, text: str) -> list[int]:
        if not text:
            return []
        text = text if text.isascii() else SURROGATES.sub("\ufffd", text)
        # `encode` holds the GIL, a batch does not; the fast one omits offsets, which take most of the memory.
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


class Detokenizer:
    """The text of one stream; `visible`: control tokens to keep.  No result ends inside a character."""

    def __init__(self, tokenizer: Tokenizer, visible: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._visible = frozenset(visible)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" for a control token or an incomplete character."""
        if token_id not in self._visible and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return U+FFFD for the bytes of an incomplete character at the end of the stream."""
        return self._decoder.decode(b"", final=True)


class TooManyTokens(Exception):
    """A breaker is in so many tokens that hardly any text lies between two of them."""


def breaker_tokens(tokenizer: Tokenizer, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences in which a breaker's text begins and ends; raises TooManyTokens."""
    sequences = {sequence for text in texts for sequence in _breaker_sequences(tokenizer, text)}
    if len(sequences) > MAX_BREAKER_SEQUENCES:
        raise TooManyTokens(f"the breakers are in {len(sequences)} tokens, more than {MAX_BREAKER_SEQUENCES}")
    return tuple(sorted(sequences))


@lru_cache(maxsize=64)
def _breaker_sequences(tokenizer: Tokenizer, text: str) -> tuple[tuple[int, ...], ...]:
    raw, sequences = text.encode("utf-8", "surrogatepass"), list[tuple[int, ...]]()
    beginnings = [raw[:n] for n in range(len(raw) - 1, 0, -1)]
    for token in range(tokenizer.n_vocab):
        word = tokenizer.token_bytes(token)
        if raw in word:
            sequences.append((token,))
            continue
        sequences += [
            (token, *tokenizer.encode(rest))
            for beginning in beginnings
            if word.endswith(beginning) and (rest := _decoded(raw[len(beginning) :]))
        ]
    return tuple(sequences)


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""


def _scheme(metadata: Mapping[str, object]) -> PreTokenizerSpec:
    model = require(metadata, MODEL_KEY, str)
    if model == SENTENCEPIECE:
        prefix_space = require(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
        return replace(SENTENCEPIECE_SPEC, prefix_space=prefix_space)
    if model == WORDPIECE:
        return WORDPIECE_SPEC
    if model not in ("gpt2", "gemma4"):
        known = "'gpt2' (byte-pair merges), 'llama' (SentencePiece), 'bert' (WordPiece) and 'gemma4'"
        raise TokenizerError(f"{MODEL_KEY} = {model!r} is not known; known are {known}")
    pre = "gemma4" if model == "gemma4" else require(metadata, PRE_KEY, str, "default")
    if pre not in PRE_TOKENIZERS:
        names = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(f"{PRE_KEY} = {pre!r} is not known, so text could be split wrongly; known are {names}")
    return PRE_TOKENIZERS[pre]


def _is_plain(text: str, kind: int, scheme: PreTokenizerSpec) -> bool:
    return kind == TokenType.USER_DEFINED and scheme.added_text.fullmatch(text) is not None


def _build_wordpiece(vocabulary: Vocabulary) -> BpeCore:
    """Build BERT's: a file does not say whether it takes capitals; its tokens do."""
    if vocabulary.unknown is None:
        raise TokenizerError(f"{TOKENS_KEY} has no unknown token; convert the file again")
    words, cased = {}, False
    for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if token_id == vocabulary.unknown or kind == TokenType.CONTROL:
            words[text] = token_id
        elif kind != TokenType.UNUSED:
            word = text.removeprefix("▁")
            words[word if word != text else f"##{text}"] = token_id
            cased |= word != word.lower() and not word.startswith("[")
    unknown = vocabulary.tokens[vocabulary.unknown]
    core = BpeCore(models.WordPiece(vocab=words, unk_token=unknown, max_input_chars_per_word=100))
    core.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return core


def _build_core(vocabulary: Vocabulary, scheme: PreTokenizerSpec) -> BpeCore:
    if scheme.wordpiece:
        return _build_wordpiece(vocabulary)
    tokens, types = vocabulary.tokens, vocabulary.types
    usable = {
        text: token_id
        for token_id, text in enumerate(tokens)
        if text and types[token_id] not in (TokenType.CONTROL, TokenType.UNUSED)
    }
    if (
        broken := next((text for text in usable if any("\ud800" <= letter <= "\udfff" for letter in text)), None)
    ) is not None:
        raise TokenizerError(f"{TOKENS_KEY} has the token {broken!r} at {usable[broken]}, which is no Unicode text")
    # The library drops bytes without a letter, as in training: a vocabulary may lack those that its texts never had.
    needed = {chr(letter) for letter, byte in _byte_alphabet().items() if byte in _NEEDED}
    missing = sorted(needed - usable.keys())
    if scheme.byte_level and missing:
        raise TokenizerError(f"{TOKENS_KEY} lacks {len(missing)} byte letters of ASCII, such as {missing[0]!r}")
    unknown = None
    if vocabulary.unknown is not None and not scheme.byte_level:
        unknown = tokens[vocabulary.unknown]
        usable[unknown] = vocabulary.unknown
    # Files from llama.cpp's converter may have merges of strings that are not tokens: drop them.
    merges = [
        (left, right)
        for left, right in vocabulary.merges
        if left in usable and right in usable and left + right in usable
    ] or merges_of_scores(_scores(vocabulary, usable))
    model = models.BPE(
        vocab=usable,
        merges=merges,
        unk_token=unknown,
        fuse_unk=unknown is not None,
        byte_fallback=not scheme.byte_level,
        ignore_merges=scheme.ignore_merges,
    )
    core = BpeCore(model)
    if (normalizer := scheme.normalizer()) is not None:
        core.normalizer = normalizer
    if (pre_tokenizer := scheme.pre_tokenizer()) is not None:
        core.pre_tokenizer = pre_tokenizer
    core.add_tokens(
        [
            AddedToken(text, normalized=False, special=False)
            for text, token_id in usable.items()
            if _is_plain(text, types[token_id], scheme) or (scheme.whole_text and scheme.whole_text.fullmatch(text))
        ]
    )
    return core


def _scores(vocabulary: Vocabulary, usable: Mapping[str, int]) -> dict[str, float]:
    """Return the scores of the tokens that text is merged to."""
    types, scores = vocabulary.types, vocabulary.scores
    return {text: scores[i] for text, i in usable.items() if scores and types[i] != TokenType.BYTE}


def _token_bytes(vocabulary: Vocabulary, scheme: PreTokenizerSpec) -> list[bytes]:
    """Return the bytes of each token: through GPT-2's byte alphabet, or `<0xNN>` and U+2581 for SentencePiece's way."""
    alphabet = _byte_alphabet()
    result = []
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in _MARKER_TYPES or kind == TokenType.UNUSED:
            result.append(text.encode("utf-8", errors="replace"))
        elif scheme.byte_level:
            raw = text.translate(alphabet)
            # A character outside the alphabet makes the whole token literal text, as the `tokenizers` library has it.
            literal = any(character not in alphabet for character in map(ord, text))
            result.append(text.encode("utf-8", errors="replace") if literal else raw.encode("latin-1"))
        elif kind == TokenType.BYTE and (match := _BYTE_TOKEN.fullmatch(text)):
            result.append(bytes([int(match.group(1), 16)]))
        else:
            shown = text.replace("▁", " ") if scheme.normal is Normalization.METASPACE else text
            result.append(shown.encode("utf-8", errors="replace"))
    return result


def _byte_alphabet() -> dict[int, str]:
    """Return GPT-2's byte alphabet as a translation table: letter (code point) to the character of its byte's value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(0x100) if byte not in set(printable)]
    table = {byte: chr(byte) for byte in printable}
    table.update({0x100 + index: chr(byte) for index, byte in enumerate(unprintable)})
    return table


def _any_of(words: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of the words, built as a trie (Gemma has 6,000 words)."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}  # a word ends here

    def pattern(node: Mapping[str, Any]) -> str:
        branches = [re.escape(letter) + pattern(below) for letter, below in node.items() if letter]
        if not branches:
            return ""
        return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"

    try:
        return re.compile(pattern(tree) or "(?!)")
    except RecursionError as error:
        longest = max(map(len, words))
        raise TokenizerError(
            f"{TOKENS_KEY} has a control token of {longest} characters; convert the file again"
        ) from error


def _trusted_ranges(runs: Sequence[Segment]) -> Iterator[tuple[int, int]]:
    start = position = 0
    for index, segment in enumerate(runs):
        if segment.trusted and (index == 0 or not runs[index - 1].trusted):
            start = position
        position += len(segment.text)
        if segment.trusted and (index + 1 == len(runs) or not runs[index + 1].trusted):
            yield start, position
