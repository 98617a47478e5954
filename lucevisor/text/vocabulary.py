"""The vocabulary of a GGUF file: tokens, their types and merges, and which of them end a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

from lucevisor.errors import LucevisorError

_T = TypeVar("_T")

MODEL_KEY: Final = "tokenizer.ggml.model"
PRE_KEY: Final = "tokenizer.ggml.pre"
TOKENS_KEY: Final = "tokenizer.ggml.tokens"
TYPES_KEY: Final = "tokenizer.ggml.token_type"
MERGES_KEY: Final = "tokenizer.ggml.merges"
SCORES_KEY: Final = "tokenizer.ggml.scores"
ADD_BOS_KEY: Final = "tokenizer.ggml.add_bos_token"
ADD_EOS_KEY: Final = "tokenizer.ggml.add_eos_token"
SENTENCEPIECE: Final = "llama"
"""The value of ``tokenizer.ggml.model`` for SentencePiece's vocabularies."""
WORDPIECE: Final = "bert"
"""The same for WordPiece's: a token that begins a word has U+2581 before it."""

# End-of-generation tokens (EOG) by text: files name one id only (`eos_token_id`), models stop at several.
# Those of llama.cpp's list that a byte-pair vocabulary can hold, and Laguna's end of turn, which older files do not
# name.
_ENDINGS: Final = frozenset(
    [
        *["<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],  # Qwen
        *["<eos>", "<end_of_turn>", "<turn|>", "<|tool_response>"],  # Gemma; the last hands over to a tool
        *["</assistant>"],  # Laguna
        *["<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end_of_text|>"],  # Llama
        *["<|end|>", "<|return|>", "</s>", "<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>"],
    ]
)
# Of gpt-oss, whose answers are several messages: `<|end|>` ends one of these only.
_ANSWER_ENDINGS: Final = frozenset(["<|return|>", "<|call|>"])
_MESSAGE_ENDING: Final = "<|end|>"
# Tokens that end another role's message, in templates that close each role by its own tag.
_TURN_ENDINGS: Final = frozenset(["</user>", "</system>"])

_OF_WORDPIECE: Final = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]"}
"""Tokens of WordPiece vocabularies by the names of their keys, which files may lack."""
_ROLES: Final = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "mask": "mask_token",
}


class TokenizerError(LucevisorError):
    """The tokenizer part of a GGUF file is invalid; the message names the key, the value and the known values."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """All tokens of a model. `turn_end_ids`: `eos_ids`, and tokens that end another role's message. `scores`: where
    they stand for `merges`. `add_bos`: None when the file does not say. `end`: of a text that is pooled."""

    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[tuple[str, str]]
    scores: Sequence[float]
    eos_ids: frozenset[int]
    turn_end_ids: frozenset[int]
    bos: int | None
    unknown: int | None
    add_bos: bool | None
    end: int | None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Vocabulary:
        """Build the vocabulary from GGUF metadata; raises TokenizerError naming the key."""
        tokens = require(metadata, TOKENS_KEY, list)
        types = require(metadata, TYPES_KEY, list, [int(TokenType.NORMAL)] * len(tokens))
        if len(types) != len(tokens):
            counts = f"{TYPES_KEY} has {len(types)} entries, {TOKENS_KEY} has {len(tokens)}"
            raise TokenizerError(f"{counts}; convert the file again")
        _check_tokens(tokens)
        sentencepiece, wordpiece = (metadata.get(MODEL_KEY) == kind for kind in (SENTENCEPIECE, WORDPIECE))
        names = ("bos", "eos", "eot", "eom", "unknown", "padding", "mask", *(("cls", "seperator") if wordpiece else ()))
        named = {
            name: token_id
            for name in names
            if (token_id := _token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens))) is not None
        }
        for name, text in _OF_WORDPIECE.items() if wordpiece else ():
            if name not in named and text in tokens and not (name == "cls" and "bos" in named):
                named[name] = tokens.index(text)
        typed = TYPES_KEY in metadata
        endings = {i for name, i in named.items() if name in ("eos", "eot", "eom")}
        turn_endings: set[int] = set()
        ends, turn_ends = _ENDINGS, _TURN_ENDINGS
        if all(text in tokens for text in _ANSWER_ENDINGS):
            ends, turn_ends = (_ENDINGS | _ANSWER_ENDINGS) - {_MESSAGE_ENDING}, _TURN_ENDINGS | {_MESSAGE_ENDING}
            endings = {i for i in endings if tokens[i] != _MESSAGE_ENDING}
        for token_id, text in enumerate(tokens):
            if text in ends or text in turn_ends:
                # Another token may look like one: `</s>` is the end of struck-out text to Gemma, user-defined or not.
                kinds = (TokenType.CONTROL,) if text == "</s>" else (TokenType.CONTROL, TokenType.USER_DEFINED)
                if typed and types[token_id] not in kinds:
                    continue
                (endings if text in ends else turn_endings).add(token_id)
        return cls(
            tokens=tokens,
            types=[TokenType.CONTROL if i in endings else kind for i, kind in enumerate(types)],
            merges=_merges(require(metadata, MERGES_KEY, list, [] if sentencepiece or wordpiece else None)),
            scores=_scores(metadata, len(tokens)) if sentencepiece else (),
            eos_ids=frozenset(endings),
            turn_end_ids=frozenset(endings | turn_endings),
            bos=named.get("cls", named.get("bos")) if wordpiece else named.get("bos"),
            unknown=named.get("unknown"),
            add_bos=require(metadata, ADD_BOS_KEY, bool) if ADD_BOS_KEY in metadata else None,
            end=_end(metadata, named, wordpiece=wordpiece),
        )


def named_tokens(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the texts of tokens with a role, by their names in chat templates (`bos_token`, ...)."""
    tokens = require(metadata, TOKENS_KEY, list, [])
    ids = {name: _token_id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens)) for key, name in _ROLES.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def require(metadata: Mapping[str, object], key: str, kind: type[_T], default: _T | None = None) -> _T:
    """Return `metadata[key]` or the default; raises TokenizerError if it is missing or of another type."""
    if key not in metadata:
        if default is None:
            raise TokenizerError(f"the GGUF file has no {key}; convert the model again, with its vocabulary")
        return default
    value = metadata[key]
    if not isinstance(value, kind):
        raise TokenizerError(f"{key} is a {type(value).__name__}, must be a {kind.__name__}; convert the file again")
    return value


def _check_tokens(tokens: Sequence[object]) -> None:
    seen: dict[str, int] = {}
    for token_id, text in enumerate(tokens):
        if not isinstance(text, str):
            raise TokenizerError(f"{TOKENS_KEY}[{token_id}] is a {type(text).__name__}, must be text")
        if text and seen.setdefault(text, token_id) != token_id:
            raise TokenizerError(f"{TOKENS_KEY}: {seen[text]} and {token_id} are both {text!r}; convert the file again")


def _scores(metadata: Mapping[str, object], n_vocab: int) -> list[float]:
    scores = require(metadata, SCORES_KEY, list)
    if len(scores) != n_vocab:
        raise TokenizerError(
            f"{SCORES_KEY} has {len(scores)} entries, {TOKENS_KEY} has {n_vocab}; convert the file again"
        )
    for token_id, score in enumerate(scores):
        if isinstance(score, bool) or not isinstance(score, int | float) or score != score:
            raise TokenizerError(f"{SCORES_KEY}[{token_id}] = {score!r} is not a number; convert the file again")
    return scores


def _token_id(metadata: Mapping[str, object], key: str, n_vocab: int) -> int | None:
    if key not in metadata:
        return None
    token_id = require(metadata, key, int)
    if not 0 <= token_id < n_vocab:
        raise TokenizerError(f"{key} = {token_id} is not a token: the vocabulary has {n_vocab}")
    return token_id


def _end(metadata: Mapping[str, object], named: Mapping[str, int], *, wordpiece: bool) -> int | None:
    """Return the token that ends a text that is pooled."""
    if wordpiece:
        return named.get("seperator", named.get("eos"))
    return named.get("eos") if require(metadata, ADD_EOS_KEY, bool, False) else None


def _merges(lines: Sequence[object]) -> list[tuple[str, str]]:
    merges = []
    for rank, line in enumerate(lines):
        # A part may begin with a space, but has none further on, so the search starts at the second character.
        space = line.find(" ", 1) if isinstance(line, str) else -1
        if not isinstance(line, str) or space < 0:
            raise TokenizerError(f"{MERGES_KEY}[{rank}] = {line!r} is not two tokens with a space between")
        merges.append((line[:space], line[space + 1 :]))
    return merges
