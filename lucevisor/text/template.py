"""Renders messages and tools into a prompt with the model's chat template, safe against prompt injection.

`TracedText` tells which characters the template wrote: only those may form control tokens. The text equals that of
transformers' `apply_chat_template`, unless the template would refuse the messages or drop one of the system's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError

from lucevisor.text.messages import TemplateError, TemplateTraits, for_strict_template, prepare_messages
from lucevisor.text.output_parser import OutputFormat, detect_format
from lucevisor.text.provenance import TracedText
from lucevisor.text.template_language import RaisedByTemplate, TemplateLanguage
from lucevisor.text.tokenizer import Segment, Tokenizer
from lucevisor.text.vocabulary import named_tokens, require

__all__ = ["ChatTemplate", "EncodedPrompt", "RenderedPrompt", "Segment", "TemplateError"]

TEMPLATE_KEY: Final = "tokenizer.chat_template"
_RUNS: Final = re.compile(rb"\x00+|\x01+")
# Errors that a template may raise on messages it was not written for, Jinja's included.
_FAULTS: Final = (
    *(JinjaError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError),
)
_RESERVED: Final = frozenset(["messages", "tools", "add_generation_prompt"])
_PROBE: Final = "probe of what is rendered"


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids; `turn_ends`: ascending offsets at which chat messages are complete."""

    ids: list[int]
    turn_ends: list[int]


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt; `reasoning_open`: it ends inside reasoning; `answering`: it ends with the beginning of an answer."""

    segments: tuple[Segment, ...]
    reasoning_open: bool
    answering: bool = False

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.encode_segments(self.segments)

    def encoded(self, tokenizer: Tokenizer) -> EncodedPrompt:
        """Return the token ids and the offsets at which a prefix cache may split them."""
        ids = self.ids(tokenizer)
        return EncodedPrompt(ids, tokenizer.turn_ends(ids))


class ChatTemplate:
    """A compiled chat template: its `source`, and the `output_format` of the model's answers."""

    def __init__(self, source: str, tokens: Mapping[str, str], clock: Callable[[], datetime] = datetime.now) -> None:
        """Compile a template; raises TemplateError naming the line of a syntax error."""
        self.source = source
        self.output_format: OutputFormat = detect_format(source)
        self._tokens = {name: TracedText.own(text) for name, text in tokens.items()}
        try:
            self._template = TemplateLanguage(clock).from_string(source)
        except TemplateSyntaxError as error:
            where = f"{TEMPLATE_KEY} line {error.lineno}"
            raise TemplateError(f"{where}: {error.message}; convert the file again") from error
        except (*_FAULTS, SyntaxError) as error:
            raise TemplateError(f"{TEMPLATE_KEY} cannot be compiled ({type(error).__name__}: {error})") from error
        self._traits = TemplateTraits(
            content_parts=self._takes_content_parts(),
            developer_role="developer" in source,
            embedded_tool_responses="tool_responses" in source and "tool_call_id" not in source,
            more_system_messages=self._takes_more_system_messages(),
            short_call_ids="length != 9" in source,
            single_calls="last_tool_call.name" in source,
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, object], clock: Callable[[], datetime] = datetime.now
    ) -> ChatTemplate | None:
        """Return the chat template of a GGUF file's metadata, or None if it has none; TemplateError if broken."""
        if TEMPLATE_KEY not in metadata:
            return None
        return cls(require(metadata, TEMPLATE_KEY, str), named_tokens(metadata), clock)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
        continued: bool = False,
    ) -> RenderedPrompt:
        """Return the prompt for OpenAI messages and tools; `extra`: further variables (`chat_template_kwargs`);
        `continued`: the last message is the beginning of the answer. Raises TemplateError, which can be shown to the
        client."""
        if continued:
            before = self.render(messages[:-1], tools=tools, enable_thinking=enable_thinking, extra=extra)
            return self._continued(before, prepare_messages(messages[-1:], self._traits)[0])
        variables: dict[str, object] = {"documents": None, **self._tokens}
        variables |= self._checked(extra or {}, enable_thinking)
        variables["messages"] = prepared = prepare_messages(messages, self._traits)
        variables["tools"] = list(tools) or None
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            text = self._run(variables)
        except TemplateError:
            insisted = for_strict_template(prepared)
            if insisted == prepared:
                raise
            text = self._run({**variables, "messages": insisted})
        plain = str.__str__(text)  # copies the text: once, not for each segment
        segments = tuple(
            Segment(plain[run.start() : run.end()], trusted=text.origin[run.start()] == 1)
            for run in _RUNS.finditer(text.origin)
        )
        return RenderedPrompt(segments, self.output_format.reasoning_open_after(segments))

    def _continued(self, before: RenderedPrompt, answer: Mapping[str, object]) -> RenderedPrompt:
        content, tags = answer.get("content") or "", self.output_format.reasoning
        if isinstance(content, list):
            content = "\n".join(part.get("text", "") for part in content)
        thought = str(answer.get("reasoning_content") or "") if tags is not None else ""
        segments, is_open = [*before.segments], before.reasoning_open
        if tags is not None and thought and not is_open:
            segments.append(Segment(tags.opening, trusted=True))
            is_open = True
        segments.append(Segment(thought, trusted=False))
        if tags is not None and content:
            segments.append(Segment(tags.closing if is_open else tags.answer, trusted=True))
            is_open = False
        segments.append(Segment(str(content), trusted=False))
        return RenderedPrompt(tuple(s for s in segments if s.text), is_open, answering=bool(content))

    def lost_markers(self, tokenizer: Tokenizer) -> list[str]:
        """Return control tokens that the template writes in a way that cannot be tracked; usually empty."""
        talk = [{"role": role, "content": "hello"} for role in ("system", "user", "assistant", "user")]
        try:
            prompt = self.render(talk)
        except TemplateError:  # some templates reject system messages
            prompt = self.render(talk[1:2])
        intended = Counter(tokenizer.encode(prompt.text, parse_special=True))
        lost = intended - Counter(prompt.ids(tokenizer))
        texts = (tokenizer.decode([token_id], skip_special=False) for token_id in lost)
        return sorted(text for text in texts if tokenizer.token_id(text) is not None)

    def _checked(self, extra: Mapping[str, object], enable_thinking: bool | None) -> dict[str, object]:
        reserved = sorted((_RESERVED | self._tokens.keys()) & extra.keys())
        if reserved:
            raise TemplateError(f"chat_template_kwargs.{reserved[0]} is set by the server; leave it out")
        if enable_thinking is None:
            return dict(extra)
        if extra.get("enable_thinking", enable_thinking) != enable_thinking:
            raise TemplateError("chat_template_kwargs.enable_thinking contradicts enable_thinking; give one of them")
        return {**extra, "enable_thinking": enable_thinking}

    def _run(self, variables: Mapping[str, object]) -> TracedText:
        try:
            return TracedText.of(self._template.render(variables))
        except RaisedByTemplate as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error
        except _FAULTS as error:
            raise TemplateError(
                f"the model's chat template cannot take these messages ({type(error).__name__}: {error}); "
                "check roles, content and tool calls"
            ) from error

    def _takes_content_parts(self) -> bool:
        """Return whether the template iterates over content parts, by rendering one; otherwise it prints their repr."""
        parts = [{"type": "text", "text": _PROBE}]
        variables = {**self._tokens, "messages": [{"role": "user", "content": parts}], "add_generation_prompt": False}
        try:
            text = self._run(variables)
        except TemplateError:
            return False
        return _PROBE in text and repr(_PROBE) not in text

    def _takes_more_system_messages(self) -> bool:
        """Return whether system messages are rendered wherever they are; many templates refuse or drop later ones."""
        opening = [{"role": "system", "content": "first"}, {"role": "system", "content": _PROBE}]
        user = {"role": "user", "content": "hello"}
        try:
            texts = [
                self._run({**self._tokens, "messages": messages, "add_generation_prompt": False})
                for messages in ([*opening, user], [opening[0], user, opening[1]])
            ]
        except TemplateError:
            return False
        return all(_PROBE in text for text in texts)
