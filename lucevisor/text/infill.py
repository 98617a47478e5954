"""Fill-in-the-middle prompts, of the tokens that a vocabulary has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from lucevisor.text.tokenizer import Tokenizer

_NAMES: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<PRE>", "<SUF>", "<MID>"),  # CodeLlama
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon
)
_FILE: Final = "<|file_sep|>"
_SNIPPET: Final = "\n\n--- snippet ---\n\n"


class ExtraInput(msgspec.Struct):
    """Text from another file of the project, before the gap."""

    text: str
    filename: str = "tmp"


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """Tokens in front of the text before a gap, of the text after it, and of the text that fills it."""

    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> InfillTokens | None:
        for names in _NAMES:
            prefix, suffix, middle = map(tokenizer.token_id, names)
            if prefix is not None and suffix is not None and middle is not None:
                return cls(prefix, suffix, middle)
        return None

    def prompt(self, before: str, after: str, files: Sequence[ExtraInput], tokenizer: Tokenizer) -> list[int]:
        """Return the prompt for a gap, after the texts of other files."""
        separator = tokenizer.token_id(_FILE)
        ids = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
        for file in files:
            ids += (
                tokenizer.encode(_SNIPPET)
                if separator is None
                else [separator, *tokenizer.encode(f"{file.filename}\n")]
            )
            ids += tokenizer.encode(file.text)
        gap = [self.prefix, *tokenizer.encode(before), self.suffix, *tokenizer.encode(after), self.middle]
        return ids + gap
