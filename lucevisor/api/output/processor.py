"""Turns the events of one sequence into deltas for the client: text, reasoning, tool calls, finish reason.

Pure: no I/O, no clock, no JSON.  Invariant: every token consumed is reported in exactly one delta, in order, and the
last delta of a choice is the only one with a finish reason.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lucevisor.engine.request import FinishedEvent, RequestError, TokenEvent, TokenScore
from lucevisor.text.detokenizer import Detokenizer
from lucevisor.text.output_parser import ContentDelta, OutputEvent, OutputParser, ReasoningDelta, ToolCallDelta
from lucevisor.text.stop import StopMatcher
from lucevisor.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "tool_calls"]


class GenerationFailed(Exception):
    """A sequence ended before its output was complete; `error` says why."""

    def __init__(self, error: RequestError) -> None:
        self.error = error
        super().__init__(error.message)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token of a delta; `offset` is where its text begins in the choice's text, in characters; `content`: some of it
    is content."""

    event: TokenEvent
    offset: int
    content: bool = True


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one or several tokens added to a choice.  `event` is None where they added nothing that is shown.

    `token_ids` are the ids of `tokens`, and at the end the id that ended the choice.  `stop` is the stop string that
    ended it, if one did.  `prompt_scores`: at the end, of all tokens of the prompt but the first, if wanted.
    `n_tokens`: those of the choice so far.
    """

    event: OutputEvent | None
    tokens: tuple[TokenRecord, ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    prompt_scores: tuple[TokenScore, ...] = ()
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceUsage:
    """Token counts of one choice.  `generated` includes the stop token, `reasoning` tokens and `accepted` drafts;
    `rejected`: drafts that were verified and are not in it.
    """

    prompt: int
    cached: int
    generated: int
    reasoning: int
    accepted: int
    rejected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How the tokens of a request are read.  `make_parser` is None for plain completions: all text is content.

    `stops` end the answer where they are in its content, behind `min_tokens`; `include_stop`: that includes them.
    `prompt_only`: there is no answer, the engine's one token aside.
    """

    stops: Sequence[str] = ()
    include_stop: bool = False
    min_tokens: int = 0
    prompt_only: bool = False
    make_parser: Callable[[], OutputParser] | None = None
    visible: frozenset[int] = frozenset()  # control tokens whose text the parser must see
    reasoning_open: bool = False
    one_tool_call: bool = False  # end after the first call


class OutputProcessor:
    """Reads the events of one sequence.  When `ended` turns true the rest is of no use: cancel the sequence."""

    def __init__(self, tokenizer: Tokenizer, options: OutputOptions) -> None:
        self._detokenizer = Detokenizer(tokenizer, options.visible)
        self._stop = StopMatcher(options.stops, included=options.include_stop)
        self._parser = options.make_parser() if options.make_parser is not None else None
        self._min_tokens = options.min_tokens
        self._prompt_only = options.prompt_only
        self._one_tool_call = options.one_tool_call
        self._in_reasoning = options.reasoning_open
        self._held: list[TokenRecord] = []  # consumed, not reported in a delta yet
        self._n_chars = 0
        self._n_tokens = 0
        self._n_reasoning = 0
        self._n_accepted = 0
        self._n_calls = 0
        self.ended = False

    def token(self, event: TokenEvent) -> list[ChoiceDelta]:
        """Process a token; return the deltas that can be sent now.  Tokens after `ended` are ignored."""
        if self.ended or self._prompt_only:
            return []
        self._n_tokens += 1
        self._n_accepted += event.drafted
        self._held.append(TokenRecord(event, self._n_chars))
        text = self._detokenizer.push(event.token)
        self._n_chars += len(text)
        events = self._parse(text)
        self._note_section(events)
        return self._deltas(self._shown(events))

    def finish(self, event: FinishedEvent) -> tuple[list[ChoiceDelta], ChoiceUsage]:
        """Process the end; return the last deltas and the token counts.

        Raises GenerationFailed when the sequence failed, or was cancelled by anyone but this processor.
        """
        if event.error is not None:
            raise GenerationFailed(event.error)
        if event.reason == "cancelled" and not self.ended:
            raise GenerationFailed(RequestError("shutting_down", "the server ended this request; send it again later"))
        cut = self.ended  # ended here: by a stop string or the only tool call allowed
        deltas: list[ChoiceDelta] = []
        if not cut:
            events = self._parse(self._detokenizer.flush())
            if self._parser is not None:
                events += self._parser.flush(cut=event.reason == "length")
            deltas = self._deltas(self._shown(events, last=True))
        rest = self._taken(last=True)
        end_ids = tuple(record.event.token for record in rest)
        if event.stop_id is not None and not cut and not self._prompt_only:
            self._n_tokens += 1
            end_ids += (event.stop_id,)
        reason, scores = self._reason(event, cut), event.prompt_scores
        deltas.append(ChoiceDelta(None, rest, end_ids, reason, self._stop.matched, scores, self._n_tokens))
        told = event.usage
        n_accepted = self._n_accepted if cut else told.accepted_tokens
        n_rejected = told.draft_tokens - n_accepted
        usage = ChoiceUsage(
            told.prompt_tokens, told.cached_tokens, self._n_tokens, self._n_reasoning, n_accepted, n_rejected
        )
        return deltas, usage

    def _parse(self, text: str) -> list[OutputEvent]:
        if not text:
            return []
        return [ContentDelta(text)] if self._parser is None else self._parser.push(text)

    def _shown(self, events: Sequence[OutputEvent], *, last: bool = False) -> list[OutputEvent]:
        """Return what may be sent of events: nothing behind a stop string in content, or behind the only call allowed.

        `last`: no more content can complete a stop string.
        """
        shown: list[OutputEvent] = []
        for event in events:
            if isinstance(event, ContentDelta):
                early = self._n_tokens <= self._min_tokens
                self._show(event.text if early else self._stop.push(event.text), shown)
                self.ended = self._stop.matched is not None
            else:
                self._show(self._stop.flush(), shown)
                shown.append(event)
                if isinstance(event, ToolCallDelta):
                    self._n_calls += 1
                    self.ended = self._one_tool_call
            if self.ended:
                return shown
        if last:
            self._show(self._stop.flush(), shown)
        return shown

    def _show(self, text: str, shown: list[OutputEvent]) -> None:
        if text:
            shown.append(ContentDelta(text))

    def _note_section(self, events: Sequence[OutputEvent]) -> None:
        """Count the token just taken as reasoning or not; one that shows nothing belongs to the section before it."""
        if events:
            self._in_reasoning = isinstance(events[-1], ReasoningDelta)
            if isinstance(events[0], ReasoningDelta):
                self._n_reasoning += 1
        elif self._in_reasoning:
            self._n_reasoning += 1

    def _deltas(self, events: Sequence[OutputEvent]) -> list[ChoiceDelta]:
        """Make a delta of each event; the tokens that are read go with the first."""
        deltas: list[ChoiceDelta] = []
        for event in events:
            taken = self._taken()
            ids = tuple(record.event.token for record in taken)
            deltas.append(ChoiceDelta(event, taken, ids, n_tokens=self._n_tokens))
        return deltas

    def _taken(self, *, last: bool = False) -> tuple[TokenRecord, ...]:
        """Take the held tokens of which the parser has read all, or the last ones, and note which are content."""
        held, self._held = self._held, []
        if self._parser is None or not held:
            return tuple(held)
        starts = [record.offset for record in held]  # at least a character each: one may come with the next token
        ends = [max(start + 1, end) for start, end in zip(starts, [*starts[1:], self._n_chars], strict=True)]
        n = len(held) if last else bisect_right(ends, self._parser.position)
        self._held = held[n:]
        taken = []
        for record, end in zip(held[:n], ends, strict=False):
            is_content = any(part.start < end and record.offset < part.stop for part in self._parser.content)
            taken.append(replace(record, content=is_content))
        if taken:
            read = ends[n - 1]
            self._parser.content = [part for part in self._parser.content if part.stop > read]
        return tuple(taken)

    def _reason(self, event: FinishedEvent, cut: bool) -> FinishReason:
        if self._prompt_only:
            return "length"
        if event.reason == "length" and self._stop.matched is None and not cut:
            return "length"
        return "tool_calls" if self._n_calls else "stop"
