"""Turns the events of one sequence into deltas for the client: text, reasoning, tool calls, finish reason.

Pure: no I/O, no clock, no JSON.  Invariant: every token consumed is reported in exactly one delta, in order, and the
last delta of a choice is the only one with a finish reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """A token of a delta; `offset` is where its text begins in the choice's text, in characters."""

    event: TokenEvent
    offset: int


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one or several tokens added to a choice.  `event` is None where they added nothing that is shown.

    `token_ids` are the ids of `tokens`, and at the end the id that ended the choice.  `stop` is the stop string that
    ended it, if one did.  `prompt_scores`: at the end, of all tokens of the prompt but the first, if wanted.
    """

    event: OutputEvent | None
    tokens: tuple[TokenRecord, ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    prompt_scores: tuple[TokenScore, ...] = ()


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
    """How the tokens of a request are read.  `make_parser` is None for plain completions: all text is content."""

    stops: Sequence[str] = ()
    make_parser: Callable[[], OutputParser] | None = None
    visible: frozenset[int] = frozenset()  # control tokens whose text the parser must see
    reasoning_open: bool = False
    one_tool_call: bool = False  # end after the first call


class OutputProcessor:
    """Reads the events of one sequence.  When `ended` turns true the rest is of no use: cancel the sequence."""

    def __init__(self, tokenizer: Tokenizer, options: OutputOptions) -> None:
        self._detokenizer = Detokenizer(tokenizer, options.visible)
        self._stop = StopMatcher(options.stops)
        self._parser = options.make_parser() if options.make_parser is not None else None
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
        if self.ended:
            return []
        self._n_tokens += 1
        self._n_accepted += event.drafted
        self._held.append(TokenRecord(event, self._n_chars))
        text = self._detokenizer.push(event.token)
        self._n_chars += len(text)
        events = self._parse(self._stop.push(text))
        self._note_section(events)
        if self._stop.matched is not None:
            self.ended = True
        return self._deltas(events)

    def finish(self, event: FinishedEvent) -> tuple[list[ChoiceDelta], ChoiceUsage]:
        """Process the end; return the last deltas and the token counts.

        Raises GenerationFailed when the sequence failed, or was cancelled by anyone but this processor.
        """
        if event.error is not None:
            raise GenerationFailed(event.error)
        if event.reason == "cancelled" and not self.ended:
            raise GenerationFailed(RequestError("shutting_down", "the server ended this request; send it again later"))
        cut = self.ended  # ended here: by a stop string or the only tool call allowed
        events: list[OutputEvent] = []
        if not (self._one_tool_call and self._n_calls):
            rest = self._stop.push(self._detokenizer.flush())
            events = self._parse(rest + self._stop.flush())
            if self._parser is not None:
                events += self._counted(self._parser.flush(cut=event.reason == "length"))
        deltas = self._deltas(events)
        end_ids = tuple(record.event.token for record in self._held)
        if event.stop_id is not None and not cut:
            self._n_tokens += 1
            end_ids += (event.stop_id,)
        reason, scores = self._reason(event, cut), event.prompt_scores
        deltas.append(ChoiceDelta(None, tuple(self._held), end_ids, reason, self._stop.matched, scores))
        self._held.clear()
        told = event.usage
        n_accepted = self._n_accepted if cut else told.accepted_tokens
        n_rejected = told.draft_tokens - n_accepted
        usage = ChoiceUsage(
            told.prompt_tokens, told.cached_tokens, self._n_tokens, self._n_reasoning, n_accepted, n_rejected
        )
        return deltas, usage

    def _parse(self, text: str) -> list[OutputEvent]:
        if self._parser is None:
            return [ContentDelta(text)] if text else []
        return self._counted(self._parser.push(text)) if text else []

    def _counted(self, events: list[OutputEvent]) -> list[OutputEvent]:
        """Count tool calls; if only one is allowed, drop what follows it."""
        for index, event in enumerate(events):
            if isinstance(event, ToolCallDelta):
                self._n_calls += 1
                if self._one_tool_call:
                    self.ended = True
                    return events[: index + 1]
        return events

    def _note_section(self, events: Sequence[OutputEvent]) -> None:
        """Count the token just taken as reasoning or not; one that shows nothing belongs to the section before it."""
        if events:
            self._in_reasoning = isinstance(events[-1], ReasoningDelta)
            if isinstance(events[0], ReasoningDelta):
                self._n_reasoning += 1
        elif self._in_reasoning:
            self._n_reasoning += 1

    def _deltas(self, events: Sequence[OutputEvent]) -> list[ChoiceDelta]:
        """Make a delta of each event; the tokens held so far go with the first."""
        deltas: list[ChoiceDelta] = []
        for event in events:
            ids = tuple(record.event.token for record in self._held)
            deltas.append(ChoiceDelta(event, tuple(self._held), ids))
            self._held.clear()
        return deltas

    def _reason(self, event: FinishedEvent, cut: bool) -> FinishReason:
        if event.reason == "length" and self._stop.matched is None and not cut:
            return "length"
        return "tool_calls" if self._n_calls else "stop"
