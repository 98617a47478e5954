"""llama.cpp's endpoints: /completion, /completions, /infill, /embedding, /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from aiohttp import web

from lucevisor.api.bodies import prepare_request
from lucevisor.api.contexts import ModelContext
from lucevisor.api.dialects.openai_completions import CompletionBody, infill_ids, parse_completion
from lucevisor.api.dialects.openai_embeddings import answer, embeddings_of, prepare_texts, read_texts
from lucevisor.api.errors import bad_parameter
from lucevisor.api.generation import ResponseFormatter
from lucevisor.api.output import ChoiceDelta, FinishReason, TokenRecord, UsageTotals, token_score, token_text
from lucevisor.api.parameters import check_length, check_model, check_token_ids
from lucevisor.api.prepared import EmbeddingOptions, GenerationOptions, PreparedRequest
from lucevisor.api.schemas import (
    ALIASES,
    MAX_ANSWER_BYTES,
    MAX_TEXT_CHARS,
    MAX_TEXT_TOKENS,
    NEUTRAL,
    Flag,
    ParameterRules,
    ignored,
    to_record,
)
from lucevisor.text.deltas import ContentDelta
from lucevisor.text.infill import ExtraInput


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize.  `content` and `prompt` are aliases."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class EmbeddingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /embedding and /embeddings.  `content` and `input` are aliases."""

    model: str | None = None
    content: str | list[str | int | list[int]]
    embd_normalize: Literal[-1, 2] | None = None  # 2: to length 1, -1: not at all


EMBEDDING_RULES: Final = ParameterRules(aliases={"input": "content"})
RULES: Final = ParameterRules(
    neutral={"dynatemp_range": NEUTRAL["dynatemp_range"]},
    aliases={**ALIASES, "n_cmpl": "n"},
)
_LIMITS: Final = ("n_predict", "max_tokens")
_OWN: Final = frozenset(CompletionBody.__struct_fields__)


class LlamaCompletionBody(CompletionBody, kw_only=True):
    """POST /completion and /completions.  A prompt may mix texts and ids."""

    prompt: str | list[Any] | dict[str, Any]  # type: ignore[assignment]
    return_tokens: Flag = None


class InfillBody(CompletionBody, kw_only=True):
    """POST /infill.  `prompt` goes on with `input_prefix`."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraInput] | None = None
    prompt: str = ""
    return_tokens: Flag = None


def parse_llama_completion(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Parse the body of llama.cpp's /completion."""
    return _read(LlamaCompletionBody, fields, ctx)


def parse_embedding(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Create embeddings, as llama.cpp's server does."""
    body = to_record(EmbeddingBody, fields, EMBEDDING_RULES)
    check_model(body.model, ctx)
    options = EmbeddingOptions(normalize=body.embd_normalize != -1)
    names = ignored(EmbeddingBody, fields, EMBEDDING_RULES)
    return prepare_texts(read_texts(body.content, "content", ctx), options, ctx, names)


async def create_embedding(request: web.Request) -> web.Response:
    """Create embeddings, as llama.cpp's server does."""
    prepared = await prepare_request(request, parse_embedding)
    assert isinstance(prepared, PreparedRequest)
    vectors = await embeddings_of(request, prepared, "content")
    body = [{"index": index, "embedding": [vector.tolist()]} for index, vector in enumerate(vectors)]
    return answer(await asyncio.to_thread(msgspec.json.encode, body), prepared)


def parse_infill(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Parse the body of llama.cpp's /infill."""
    return _read(InfillBody, fields, ctx)


def _read(
    kind: type[LlamaCompletionBody] | type[InfillBody], fields: dict[str, Any], ctx: ModelContext
) -> PreparedRequest:
    unlimited = [name for name in _LIMITS if isinstance(n := fields.get(name), int) and n < 0]
    fields = {name: value for name, value in fields.items() if name not in unlimited}
    body = to_record(kind, fields, RULES)
    if isinstance(body, InfillBody):
        files = body.input_extra or ()
        prompt: Any = infill_ids(body.input_prefix + body.prompt, body.input_suffix, files, "input_suffix", ctx)
    else:
        prompt = body.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = _ids(prompt[0], "prompt[0]", ctx)
        elif isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt):
            prompt = [_ids(part, f"prompt[{index}]", ctx) for index, part in enumerate(prompt)]
        elif not isinstance(prompt, str):
            prompt = _ids(prompt, "prompt", ctx)
    own = {RULES.aliases.get(name, name): value for name, value in fields.items()}
    kept = {name: value for name, value in own.items() if name in _OWN}
    prepared = parse_completion({**kept, "prompt": prompt, "return_token_ids": body.return_tokens}, ctx)
    return prepared.with_options(ignored=ignored(kind, fields, RULES))


def _ids(prompt: object, where: str, ctx: ModelContext) -> list[int]:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise bad_parameter(f"{where}.multimodal_data", "is not supported; this server reads text only")
        prompt, where = prompt.get("prompt_string"), f"{where}.prompt_string"
    ids: list[int] = []
    for index, part in enumerate(prompt if isinstance(prompt, list) else [prompt]):
        place = f"{where}[{index}]" if isinstance(prompt, list) else where
        if isinstance(part, str):
            check_length(part, place, ctx)
            ids += ctx.tokenizer.encode(part, parse_special=True) if index else ctx.tokenizer.encode_prompt(part)
        elif isinstance(part, int) and not isinstance(part, bool) and 0 <= part < ctx.tokenizer.n_vocab:
            ids.append(part)
        else:
            raise bad_parameter(place, f"is neither text nor a token id, 0 to {ctx.tokenizer.n_vocab - 1}")
    return ids


def parse_tokenize(fields: dict[str, Any], ctx: ModelContext) -> bytes:
    """Convert a text to token ids."""
    body = to_record(TokenizeBody, fields)
    check_model(body.model, ctx)
    if body.content is not None and body.prompt is not None:
        raise bad_parameter("prompt", "is an alias of content; send one of them")
    text = body.prompt if body.content is None else body.content
    if text is None:
        raise bad_parameter("content", "is missing; it is required", "missing_required_parameter")
    param = "content" if body.prompt is None else "prompt"
    if len(text) > MAX_TEXT_CHARS:
        raise bad_parameter(param, f"has {len(text)} characters, more than {MAX_TEXT_CHARS}; send it in parts")
    tokenizer = ctx.tokenizer
    ids = tokenizer.encode(text, parse_special=body.parse_special)
    if body.add_special and tokenizer.add_bos and tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids.insert(0, tokenizer.bos)
    tokens: list[object] = list(ids)
    if body.with_pieces:
        tokens = [{"id": i, "piece": token_text(tokenizer, i)} for i in ids]
    return _bounded({"tokens": tokens, "count": len(ids)}, param)


def parse_detokenize(fields: dict[str, Any], ctx: ModelContext) -> bytes:
    """Convert token ids to text, control tokens included."""
    body = to_record(DetokenizeBody, fields)
    check_model(body.model, ctx)
    if len(body.tokens) > MAX_TEXT_TOKENS:
        raise bad_parameter("tokens", f"has {len(body.tokens)} ids, more than {MAX_TEXT_TOKENS}; send it in parts")
    check_token_ids(body.tokens, "tokens", ctx)
    return _bounded({"content": ctx.tokenizer.decode(body.tokens, skip_special=False)}, "tokens")


def _bounded(answer: object, param: str) -> bytes:
    body = msgspec.json.encode(answer)
    if len(body) > MAX_ANSWER_BYTES:
        raise bad_parameter(
            param, f"the response has {len(body)} bytes, more than {MAX_ANSWER_BYTES}; send it in parts"
        )
    return body


_STOP_TYPES: Final[dict[FinishReason, str]] = {"length": "limit", "stop": "eos", "tool_calls": "eos"}


@dataclass(slots=True)
class _Choice:
    """Progress of one choice, for its last event."""

    n_prompt: int
    prompt: str
    n_tokens: int = 0
    reason: FinishReason = "stop"
    stop: str | None = None
    has_new_line: bool = False


class LlamaCppFormatter(ResponseFormatter):
    """Formatter of llama.cpp's completions and their events."""

    id_prefix = "cmpl-"
    prompt_param = "prompt"
    style = "unended"

    def __init__(self, prepared: PreparedRequest, ctx: ModelContext) -> None:
        super().__init__(prepared, ctx)
        decode, prompts = self.tokenizer.decode, prepared.prompts
        texts = [(len(prompt), decode(prompt, skip_special=False)) for prompt in prompts]
        self._choices = [_Choice(*text) for text in texts for _ in range(self.options.n)]

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[object]:
        result = self._part(index, [delta])
        return [result] if delta.event is not None or delta.tokens else ()

    def end(self, totals: UsageTotals) -> Sequence[object]:
        return [self._whole(index, {"content": "", "tokens": []}, totals) for index in range(len(self._choices))]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        result = [self._whole(index, self._part(index, deltas), totals) for index, deltas in enumerate(choices)]
        return result[0] if len(result) == 1 else result

    def _part(self, index: int, deltas: Sequence[ChoiceDelta]) -> dict[str, object]:
        choice = self._choices[index]
        content = "".join(delta.event.text for delta in deltas if isinstance(delta.event, ContentDelta))
        tokens = [token for delta in deltas for token in delta.tokens]
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        choice.n_tokens += len(ids)
        choice.has_new_line |= "\n" in content
        if deltas[-1].finish_reason is not None:
            choice.reason, choice.stop = deltas[-1].finish_reason, deltas[-1].stop
        part: dict[str, object] = {
            "index": index,
            "content": content,
            "tokens": ids if self.options.token_ids else [],
            "stop": False,
            "id_slot": -1,  # sequences are not bound to slots
            "tokens_predicted": choice.n_tokens,
            "tokens_evaluated": choice.n_prompt,
        }
        return part | ({"completion_probabilities": list(map(self._scored, tokens))} if self.options.logprobs else {})

    def _whole(self, index: int, part: dict[str, object], totals: UsageTotals) -> dict[str, object]:
        choice = self._choices[index]
        return {
            "index": index,
            "id_slot": -1,
            **part,
            "stop": True,
            "model": self.card.name,
            "tokens_predicted": choice.n_tokens,
            "tokens_evaluated": choice.n_prompt,
            "generation_settings": _settings(self.options),
            "prompt": choice.prompt,
            "has_new_line": choice.has_new_line,
            "truncated": False,
            "stop_type": "word" if choice.stop is not None else _STOP_TYPES[choice.reason],
            "stopping_word": choice.stop or "",
            "tokens_cached": choice.n_prompt + choice.n_tokens,
            "timings": totals.llama_timings(),
        }

    def _scored(self, record: TokenRecord) -> dict[str, object]:
        def entry(token: int, logprob: float | None) -> dict[str, object]:
            return {"id": token, **token_score(self.tokenizer, token, logprob)}

        event = record.event
        return {**entry(event.token, event.logprob), "top_logprobs": [entry(*item) for item in event.top]}


class InfillFormatter(LlamaCppFormatter):
    """Formatter of /infill."""

    prompt_param = "input_suffix"


def _settings(options: GenerationOptions) -> dict[str, object]:
    sampling = options.sampling
    names = ("seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty")
    n_predict = 0 if options.prompt_only else -1 if options.max_tokens is None else options.max_tokens
    return {
        **{name: getattr(sampling, name) for name in names},
        "repeat_penalty": sampling.repetition_penalty,
        "n_predict": n_predict,
        "max_tokens": n_predict,
        "stop": list(options.stops),
        "ignore_eos": options.ignore_eos,
        "stream": options.stream,
        "n_probs": max(0, sampling.n_top_logprobs),
    }
