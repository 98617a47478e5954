"""What ``lucevisor bench`` measures, named as llama-bench names it.

pp512 is a prompt of 512 tokens, tg128 an answer of 128, ``tg128 @ d4096`` one behind 4,096 tokens, ``tg128 x8`` eight
of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHORT_PROMPT = 16
"""Prompt tokens of an answer at depth 0."""


@dataclass(frozen=True, slots=True)
class Case:
    """Prefill of ``prompt`` tokens, or decode of ``answer`` tokens behind ``depth`` by ``streams`` at once."""

    prompt: int = 0
    answer: int = 0
    depth: int = 0
    streams: int = 1

    @property
    def name(self) -> str:
        if self.prompt:
            return f"pp{self.prompt}"
        at, times = f" @ d{self.depth}" if self.depth else "", f" x{self.streams}" if self.streams > 1 else ""
        return f"tg{self.answer}{at}{times}"

    @property
    def context(self) -> int:
        """Positions that a sequence takes."""
        return self.prompt + 1 if self.prompt else max(self.depth, SHORT_PROMPT) + self.answer


def cases(prompts: Sequence[int], answer: int, depths: Sequence[int], streams: Sequence[int]) -> list[Case]:
    """All combinations that are asked for: depths for one stream, streams without depth."""
    out = [Case(prompt=n) for n in prompts if n]
    if answer:
        out += [Case(answer=answer, depth=depth) for depth in depths]
        out += [Case(answer=answer, streams=n) for n in streams if n > 1]
    return list(dict.fromkeys(out))
