"""What a model's answers look like: which tags set reasoning apart and in which format it calls tools.

Knows templates only as text to look for tags in. Invariant: a format is chosen once, from the chat template, and
never from what a model happens to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lucevisor.text.tokenizer import Segment, Tokenizer
from lucevisor.text.tools import ToolFormat, detect_tool_format


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around reasoning; `label` is a word that follows the opening tag and is no part of the reasoning.

    `anywhere`: the opening tag is a control token of its own, so it opens reasoning wherever it stands; else only
    where an answer begins, because the same letters in the middle of one are quoted text.
    """

    open: str
    close: str
    label: str = ""
    anywhere: bool = False


THINK = ReasoningTags("<think>", "</think>")
CHANNEL = ReasoningTags("<|channel>", "<channel|>", label="thought\n", anywhere=True)


@dataclass(frozen=True)
class OutputFormat:
    """The tags of one model's answers; None for what the model does not do."""

    reasoning: ReasoningTags | None = None
    tools: ToolFormat | None = None

    def visible_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the control tokens whose text the output parser must see (give them to Detokenizer)."""
        tags = [*self._reasoning_tags(), *(self.tools.tags if self.tools else ())]
        ids = (tokenizer.token_id(tag) for tag in tags)
        return frozenset(i for i in ids if i is not None and i not in tokenizer.eos_ids)

    def reasoning_open_after(self, segments: Sequence[Segment]) -> bool:
        """Say whether a prompt ends inside a reasoning block that its template opened."""
        if self.reasoning is None:
            return False
        for segment in reversed(segments):
            if segment.trusted:
                opened = segment.text.rfind(self.reasoning.open)
                closed = segment.text.rfind(self.reasoning.close)
                if max(opened, closed) >= 0:
                    return opened > closed
        return False

    def _reasoning_tags(self) -> Iterable[str]:
        return (self.reasoning.open, self.reasoning.close) if self.reasoning else ()


def detect_format(template: str) -> OutputFormat:
    """Return the output format of a model from the source of its chat template."""
    reasoning = next((tags for tags in (CHANNEL, THINK) if tags.close in template), None)
    return OutputFormat(reasoning, detect_tool_format(template))
