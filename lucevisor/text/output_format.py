"""The format of a model's output: its reasoning tags and its tool-call format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lucevisor.text.reasoning import CHANNEL, THINK, ReasoningTags
from lucevisor.text.tokenizer import Segment, Tokenizer
from lucevisor.text.tools import ToolFormat, detect_tool_format


@dataclass(frozen=True)
class OutputFormat:
    """The tags of one model's output; None for unsupported features."""

    reasoning: ReasoningTags | None = None
    tools: ToolFormat | None = None

    def visible_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the control tokens whose text the output parser needs, for Detokenizer's `visible`."""
        tags = [*self._reasoning_tags(), *(self.tools.tags if self.tools else ())]
        ids = (tokenizer.token_id(tag) for tag in tags)
        return frozenset(i for i in ids if i is not None and i not in tokenizer.eos_ids)

    def reasoning_open_after(self, segments: Sequence[Segment]) -> bool:
        """Return whether a prompt ends inside a reasoning block that its template opened."""
        if self.reasoning is None:
            return False
        for segment in reversed(segments):
            if segment.trusted:
                opened = segment.text.rfind(self.reasoning.open)
                closed = segment.text.rfind(self.reasoning.close)
                if max(opened, closed) >= 0:
                    return opened > closed
        return False

    def reasoning_after(self, prompt: str) -> ReasoningTags | None:
        """Return the tags of the reasoning that may follow a prompt: none after a block that the template closed."""
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning.close):
            return None
        return self.reasoning

    def _reasoning_tags(self) -> Iterable[str]:
        return (self.reasoning.open, self.reasoning.close) if self.reasoning else ()


def detect_format(template: str) -> OutputFormat:
    reasoning = next((tags for tags in (CHANNEL, THINK) if tags.close in template), None)
    return OutputFormat(reasoning, detect_tool_format(template))
