"""OpenAI's completions.  Prompts sent as token ids reach the engine unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from msgspec import Meta

from lucevisor.api.constraint import output_grammar, requested_form
from lucevisor.api.contexts import ModelContext
from lucevisor.api.errors import bad_parameter
from lucevisor.api.generation import OpenAiFormatter
from lucevisor.api.output import (
    ChoiceDelta,
    UsageTotals,
    completion_logprobs,
    echoed_logprobs,
)
from lucevisor.api.parameters import (
    check_choices,
    check_common,
    check_length,
    check_min_tokens,
    check_token_ids,
    check_tokens,
    common_options,
    max_tokens_of,
    n_top_logprobs,
    random_seed,
    read_inputs,
    sampling_params,
)
from lucevisor.api.prepared import GenerationOptions, PreparedRequest
from lucevisor.api.schemas import (
    MAX_ECHO_CHARS,
    MAX_PROMPT_LOGPROBS,
    MAX_TOP_LOGPROBS,
    OPENAI,
    Flag,
    GenerationBody,
    ignored,
    to_record,
)
from lucevisor.text.deltas import ContentDelta
from lucevisor.text.infill import ExtraInput, InfillTokens
from lucevisor.text.tokenizer import Tokenizer


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: Flag = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | bool | None = None


RULES: Final = replace(OPENAI, aliases={**OPENAI.aliases, "prompt_token_ids": "prompt"})


def parse_completion(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Parse the body of a completion of a text or of token ids."""
    body = to_record(CompletionBody, fields, RULES)
    check_common(body, ctx)
    n_logprobs = body.logprobs or None if isinstance(body.logprobs, bool) else body.logprobs
    n_top = n_top_logprobs(body, None if n_logprobs is None else int(n_logprobs), "logprobs")
    prompt_logprobs = bool(body.echo) and n_top >= 0
    if prompt_logprobs and body.stream:
        raise bad_parameter(
            "stream", "true is not available with echo and logprobs; leave one of them out", "unsupported_value"
        )
    prompt = body.prompt
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    n = check_choices(body.n, len(prompt) if several else 1)
    prompts = _read_gap(body, ctx) if body.suffix else read_prompts(body.prompt, ctx)
    if prompt_logprobs:
        _check_logprobs(prompts, n, n_top)
    grammar, prompt_only = output_grammar(requested_form(body), ctx), body.max_tokens == 0
    options = GenerationOptions(
        sampling=sampling_params(body, ctx, random_seed(), n_top, structured=grammar is not None),
        turn_ends=[[] for _ in prompts],
        max_tokens=1 if prompt_only else max_tokens_of(body.max_tokens),
        min_tokens=0 if prompt_only else check_min_tokens(body, max_tokens_of(body.max_tokens)),
        prompt_only=prompt_only,
        n=n,
        **common_options(body, ctx, ignored(CompletionBody, fields, RULES)),
        grammar=grammar,
        plain=True,
        logprobs=n_top >= 0,
        echoes=_echoes(prompts, n, ctx.tokenizer) if body.echo else (),
        prompt_logprobs=prompt_logprobs,
    )
    return PreparedRequest(options, [tuple(prompt.ids) for prompt in prompts])


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str | None = None


def _echoes(prompts: list[Prompt], n: int, tokenizer: Tokenizer) -> tuple[str, ...]:
    echoes = tuple(tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text for prompt in prompts)
    n_chars = n * sum(map(len, echoes))
    if n_chars > MAX_ECHO_CHARS:
        raise bad_parameter(
            "echo",
            f"would repeat {n_chars} characters, more than {MAX_ECHO_CHARS}; leave it out or request fewer choices",
        )
    return echoes


def _check_logprobs(prompts: list[Prompt], n: int, n_top: int) -> None:
    n_logprobs = n * (1 + n_top) * sum(len(prompt.ids) for prompt in prompts)
    if n_logprobs > MAX_PROMPT_LOGPROBS:
        reason = (
            f"of the prompts would be {n_logprobs}, more than {MAX_PROMPT_LOGPROBS}; request fewer, or of fewer choices"
        )
        raise bad_parameter("logprobs", reason)


def read_prompts(prompt: str | list[str | int | list[int]], ctx: ModelContext) -> list[Prompt]:
    if prompt == []:
        raise bad_parameter("prompt", "is an empty array; send text or token ids")

    def of_text(text: str, where: str) -> Prompt:
        check_length(text, where, ctx)
        return checked(ctx.tokenizer.encode_prompt(text), where, text)

    def checked(ids: list[int], where: str, text: str | None = None) -> Prompt:
        if not ids:
            raise bad_parameter(where, "is empty; the model needs at least one token to continue")
        check_tokens(len(ids), where, ctx)
        check_token_ids(ids, where, ctx)
        return Prompt(ids, text)

    return read_inputs(prompt, "prompt", of_text, checked, "prompt")


def _read_gap(body: CompletionBody, ctx: ModelContext) -> list[Prompt]:
    """Return the prompt for the gap between `prompt` and `suffix`; an echo is of `prompt` alone."""
    if not isinstance(body.prompt, str):
        raise bad_parameter("suffix", "needs one text as prompt; send prompt as one text, or leave suffix out")
    if body.echo and body.logprobs:
        raise bad_parameter("logprobs", "is not available with echo and suffix; leave one of them out")
    ids = infill_ids(body.prompt, body.suffix or "", (), "suffix", ctx)
    check_tokens(len(ids), "prompt", ctx)
    return [Prompt(ids, body.prompt)]


def infill_ids(before: str, after: str, files: Sequence[ExtraInput], param: str, ctx: ModelContext) -> list[int]:
    """Return the prompt for a gap; raises ApiError naming `param` if the vocabulary has no tokens for that."""
    tokens = InfillTokens.of(ctx.tokenizer)
    if tokens is None:
        raise bad_parameter(
            param, "the model's vocabulary has no fill-in-the-middle tokens; serve a model that has", "no_infill"
        )
    for text in (before, after, *(file.text for file in files)):
        check_length(text, param, ctx)
    return tokens.prompt(before, after, files, ctx.tokenizer)


class CompletionFormatter(OpenAiFormatter):
    """Formatter of plain completions and their chunks."""

    id_prefix = "cmpl-"
    prompt_param = "prompt"
    chunk_kind = "text_completion"

    def start(self, index: int) -> Sequence[object]:
        if not (self.options.echoes or self.options.token_ids):
            return ()
        delta = ChoiceDelta(None)
        choice = self._choice(index, self._echo(index), delta) | self.prompt_ids(index)
        return [self.chunk(index, choice, delta)]

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[object]:
        return [self.chunk(index, self._choice(index, _text(delta), delta), delta)]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        bodies = []
        for index, deltas in enumerate(choices):
            tokens = tuple(token for delta in deltas for token in delta.tokens)
            joined = replace(deltas[-1], tokens=tokens)
            text = self._echo(index) + "".join(map(_text, deltas))
            choice = self._choice(index, text, joined, full=True) | self.prompt_ids(index)
            bodies.append(self.with_ids(choice, deltas))
        return self.response(self.chunk_kind, bodies, totals)

    def _echo(self, index: int) -> str:
        return self.options.echoes[index // self.options.n] if self.options.echoes else ""

    def _choice(self, index: int, text: str, delta: ChoiceDelta, *, full: bool = False) -> dict[str, object]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, delta, full=full),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, index: int, delta: ChoiceDelta, *, full: bool) -> object:
        if not self.options.logprobs or not (delta.tokens or full):
            return None
        if not self.options.prompt_logprobs:
            return completion_logprobs(self.tokenizer, delta.tokens)
        prompt, n_echo = self.prompt_of(index), len(self._echo(index))
        return echoed_logprobs(self.tokenizer, prompt, delta.prompt_logprobs, delta.tokens, n_echo)


def _text(delta: ChoiceDelta) -> str:
    return delta.event.text if isinstance(delta.event, ContentDelta) else ""
