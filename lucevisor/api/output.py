"""Turns the events of sequences into deltas, log-probabilities and token counts, which the dialects write as JSON.
Every token is in exactly one delta, in order, and only the last one has a finish reason."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from lucevisor.api.prepared import GenerationOptions
from lucevisor.compression.compressor import CompressedPrompt
from lucevisor.engine.request import FinishedEvent, RequestError, Timings, TokenEvent, TokenLogprob
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.deltas import AnswerParser, ContentDelta, OutputEvent, ReasoningDelta, ToolCallDelta
from lucevisor.text.output_parser import OutputFormat, StopMatcher
from lucevisor.text.tokenizer import Detokenizer, Tokenizer

FinishReason = Literal["stop", "length", "tool_calls"]


class GenerationFailed(Exception):
    """A sequence ended before its output was complete; `error`: the reason."""

    def __init__(self, error: RequestError) -> None:
        self.error = error
        super().__init__(error.message)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token of a delta; `offset`: where its text begins in the choice's; `content`: some of it is content."""

    event: TokenEvent
    offset: int
    content: bool = True


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """Addition of one or several tokens to a choice.  `event` is None where they add nothing that is shown.

    `token_ids` are the ids of `tokens`, and at the end the id that ended the choice.  `stop` is the stop string that
    ended it, if one did.  `prompt_logprobs`: at the end, of all tokens of the prompt but the first, if wanted.
    `n_tokens`: those of the choice so far.
    """

    event: OutputEvent | None
    tokens: tuple[TokenRecord, ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    n_tokens: int = 0


class OutputProcessor:
    """Reads the events of one sequence.  When `ended` turns true, cancel the sequence and ignore its further tokens."""

    def __init__(
        self, tokenizer: Tokenizer, options: GenerationOptions, output_format: OutputFormat | None = None
    ) -> None:
        self._options = options
        self._parser: AnswerParser | None = None
        visible = frozenset[int]()  # control tokens whose text the parser must see
        if not options.plain and output_format is not None:
            self._parser = output_format.parser(options.reasoning_open, options.tools)
            visible = output_format.visible_ids(tokenizer)
        self._detokenizer = Detokenizer(tokenizer, visible)
        self._stop = StopMatcher(options.stops, included=options.include_stop)
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
        if self.ended or self._options.prompt_only:
            return []
        self._n_tokens += 1
        self._n_accepted += event.drafted
        self._held.append(TokenRecord(event, self._n_chars))
        text = self._detokenizer.push(event.token)
        self._n_chars += len(text)
        events = self._parse(text)
        self._note_section(events)
        return self._deltas(self._shown(events))

    def finish(self, event: FinishedEvent) -> tuple[list[ChoiceDelta], UsageTotals]:
        """Process the end; return the last deltas and the token counts. Raises GenerationFailed, also when it was
        cancelled by anyone but this processor."""
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
        if event.stop_id is not None and not cut and not self._options.prompt_only:
            self._n_tokens += 1
            end_ids += (event.stop_id,)
        reason, logprobs = self._reason(event, cut), event.prompt_logprobs
        deltas.append(ChoiceDelta(None, rest, end_ids, reason, self._stop.matched, logprobs, self._n_tokens))
        n_accepted = self._n_accepted if cut else event.usage.accepted_tokens
        usage = UsageTotals(
            prompt=event.usage.prompt_tokens,
            cached=event.usage.cached_tokens,
            generated=self._n_tokens,
            reasoning=self._n_reasoning,
            accepted=n_accepted,
            rejected=event.usage.draft_tokens - n_accepted,
            timings=event.timings,
        )
        return deltas, usage

    def _parse(self, text: str) -> list[OutputEvent]:
        if not text:
            return []
        return [ContentDelta(text)] if self._parser is None else self._parser.push(text)

    def _shown(self, events: Sequence[OutputEvent], *, last: bool = False) -> list[OutputEvent]:
        """Return the events that may be sent: none after a stop string in content, or after the only call allowed."""
        shown: list[OutputEvent] = []
        for event in events:
            if isinstance(event, ContentDelta):
                early = self._n_tokens <= self._options.min_tokens
                self._show(event.text if early else self._stop.push(event.text), shown)
                self.ended = self._stop.matched is not None
            else:
                self._show(self._stop.flush(), shown)
                shown.append(event)
                if isinstance(event, ToolCallDelta):
                    self._n_calls += 1
                    self.ended = self._options.one_tool_call
            if self.ended:
                return shown
        if last:
            self._show(self._stop.flush(), shown)
        return shown

    def _show(self, text: str, shown: list[OutputEvent]) -> None:
        if text:
            shown.append(ContentDelta(text))

    def _note_section(self, events: Sequence[OutputEvent]) -> None:
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
        """Return the held tokens that the parser has read completely, at the end all, and mark those of content."""
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
        if self._options.prompt_only:
            return "length"
        if event.reason == "length" and self._stop.matched is None and not cut:
            return "length"
        return "tool_calls" if self._n_calls else "stop"


_SAMPLING: Final = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Parameters that may come from the model's defaults."""


@dataclass(slots=True)
class UsageTotals:
    """Token counts of a choice, or of a request. `generated` includes the stop token, `reasoning` tokens and `accepted`
    drafts. `timings`: of the choice that ended last; `compressed`: what PFlash made of the prompts."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0
    timings: Timings | None = None
    compressed: Sequence[CompressedPrompt] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def add(self, choice: UsageTotals, *, new_prompt: bool) -> None:
        """Add a choice; `new_prompt`: no earlier choice had the same prompt."""
        names = ("generated", "reasoning", "accepted", "rejected")
        for name in (*names, "prompt", "cached") if new_prompt else names:
            setattr(self, name, getattr(self, name) + getattr(choice, name))
        self.timings = choice.timings

    def counts(self) -> dict[str, object]:
        total = self.prompt + self.generated
        return {"prompt_tokens": self.prompt, "completion_tokens": self.generated, "total_tokens": total}

    def usage(self) -> dict[str, object]:
        return {
            **self.counts(),
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning,
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.rejected,
            },
            **self.extension(),
        }

    def extension(self) -> dict[str, object]:
        """Return `lucevisor`, an extension of any API's usage: the sampling, and what PFlash kept, if anything."""
        result: dict[str, object] = {"sampling": {name: getattr(self.sampling, name) for name in _SAMPLING}}
        asked = [prompt for prompt in self.compressed if prompt.outcome != "short"]
        if not asked:
            return {"lucevisor": result}
        pflash: dict[str, object] = {
            "prompt_tokens": sum(prompt.n_before for prompt in self.compressed),
            "kept_tokens": sum(prompt.n_kept for prompt in self.compressed),
        }
        reasons = sorted({prompt.reason for prompt in asked if prompt.reason})
        if reasons:
            pflash["reason"] = "; ".join(reasons)
        return {"lucevisor": result | {"pflash": pflash}}

    def llama_timings(self) -> dict[str, float]:
        """Return llama.cpp's `timings`: tokens that were computed, and milliseconds of prefill and of decoding."""
        t = self.timings
        if t is None:
            return {}
        result: dict[str, float] = {"cache_n": self.cached}
        for name, n, seconds in (
            ("prompt", self.prompt - self.cached, t.prefill_s),
            ("predicted", self.generated, t.decode_s),
        ):
            result |= {
                f"{name}_n": n,
                f"{name}_ms": round(1e3 * seconds, 3),
                f"{name}_per_token_ms": round(1e3 * seconds / n, 6) if n else 0.0,
                f"{name}_per_second": round(n / seconds, 3) if seconds else 0.0,
            }
        return result

    def timings_json(self) -> dict[str, float]:
        """Return `timings`, an extension: seconds in the queue, of prefill and of decoding."""
        if self.timings is None:
            return {}
        t = self.timings
        return {"queue_s": round(t.queue_s, 6), "prefill_s": round(t.prefill_s, 6), "decode_s": round(t.decode_s, 6)}


MIN_LOGPROB = -9999.0


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one token, or its escaped bytes if they are not UTF-8."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_score(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, object]:
    raw = list(tokenizer.token_bytes(token_id))
    return {"token": token_text(tokenizer, token_id), "logprob": _finite(logprob), "bytes": raw}


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenRecord]) -> dict[str, object]:
    """Return a chat choice's `logprobs`: those of its content."""
    content = [
        {
            **token_score(tokenizer, t.event.token, t.event.logprob),
            "top_logprobs": [token_score(tokenizer, *item) for item in t.event.top],
        }
        for t in tokens
        if t.content
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenRecord]) -> dict[str, list[Any]]:
    """Return a plain completion's `logprobs`; offsets count from the start of the generated text."""
    tops = []
    for t in tokens:
        top = {token_text(tokenizer, i): _finite(value) for i, value in t.event.top}
        top.setdefault(
            token_text(tokenizer, t.event.token), _finite(t.event.logprob)
        )  # like OpenAI, include the chosen token
        tops.append(top)
    return {
        "tokens": [token_text(tokenizer, t.event.token) for t in tokens],
        "token_logprobs": [_finite(t.event.logprob) for t in tokens],
        "top_logprobs": tops,
        "text_offset": [t.offset for t in tokens],
    }


def echoed_logprobs(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    tokens: Sequence[TokenRecord],
    n_echo: int,
) -> dict[str, list[Any]]:
    """Return `logprobs` of an echoed prompt, `n_echo` characters, and its completion; the first token has none."""
    records, text, at = list[TokenRecord](), Detokenizer(tokenizer), 0
    for token, found in zip(prompt, [TokenLogprob(0.0), *logprobs], strict=True):
        records.append(TokenRecord(TokenEvent(token, found.logprob, found.top), at))
        at += len(text.push(token))
    result = completion_logprobs(tokenizer, records)
    of_answer = completion_logprobs(tokenizer, tokens)
    result["token_logprobs"][0] = result["top_logprobs"][0] = None
    of_answer["text_offset"] = [n_echo + offset for offset in of_answer["text_offset"]]
    return {name: result[name] + of_answer[name] for name in result}


def _finite(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None or not MIN_LOGPROB < logprob < math.inf else logprob
