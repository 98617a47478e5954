"""Ollama's API, below /api/, translated into chat requests, or into completions with `raw`."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from lucevisor import __version__
from lucevisor.api.app_state import MODELS, context_of, model_of
from lucevisor.api.bodies import json_response, prepare_request
from lucevisor.api.contexts import ModelCard, ModelContext
from lucevisor.api.dialects.openai_chat import ChatRequestBuilder
from lucevisor.api.dialects.openai_completions import infill_ids, parse_completion
from lucevisor.api.dialects.openai_embeddings import answer, check_dimensions, embeddings_of, prepare_texts, read_texts
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.generation import ResponseFormatter
from lucevisor.api.images import image_part
from lucevisor.api.info import abilities, page
from lucevisor.api.output import ChoiceDelta, FinishReason, UsageTotals, chat_logprobs
from lucevisor.api.parameters import check_model, check_token_ids, check_tokens
from lucevisor.api.prepared import EmbeddingOptions, ModelLoadRequest, PreparedRequest
from lucevisor.api.schemas import NOT_HERE, Flag, ParameterRules, convert, ignored, to_record
from lucevisor.errors import show
from lucevisor.text.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from lucevisor.text.infill import InfillTokens

RULES: Final = ParameterRules(
    refused=dict.fromkeys(("height", "steps", "width"), NOT_HERE),
    neutral={"template": ("",)},
)

_SAME: Final = (
    *("frequency_penalty", "min_p", "mirostat", "mirostat_eta", "mirostat_tau", "presence_penalty"),
    *("seed", "stop", "temperature", "top_k", "top_p", "typical_p"),
)
OPTIONS: Final = {**{n: n for n in _SAME}, "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Ollama's options, and the chat parameters that they set."""


class OllamaBody(msgspec.Struct, kw_only=True):
    """Parameters common to both endpoints.  None: absent, the default applies."""

    model: str | None = None
    stream: Flag = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: Flag = None
    top_logprobs: int | None = None
    keep_alive: float | str | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """POST /api/chat.  Without messages it only loads the model."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """POST /api/generate.  Without a prompt it only loads the model."""

    prompt: str | None = None
    images: list[Any] | None = None
    system: str | None = None
    suffix: str | None = None
    context: list[int] | None = None
    raw: Flag = None


class EmbedBody(msgspec.Struct, kw_only=True):
    """POST /api/embed.  Without input it only loads the model."""

    model: str | None = None
    input: str | list[str] | None = None
    truncate: Flag = None
    dimensions: Annotated[int, Meta(ge=0)] | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class OldEmbeddingsBody(msgspec.Struct, kw_only=True):
    """POST /api/embeddings.  Without a prompt it only loads the model."""

    model: str | None = None
    prompt: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class ShowBody(msgspec.Struct, kw_only=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
    verbose: Flag = None


_EFFORTS: Final = ("low", "medium", "high", "max")
_NAMES: Final = {
    **{chat: f"options.{name}" for name, chat in OPTIONS.items()},
    "response_format": "format",
    "enable_thinking": "think",
    "reasoning_effort": "think",
    "chat_template_kwargs.reasoning_effort": "think",
}
"""Parameters of chat completions, and those of this API that they are made from."""


class OllamaFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def parse_ollama_chat(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest | ModelLoadRequest:
    """Parse the body of Ollama's /api/chat."""
    body = to_record(OllamaChatBody, fields, RULES)
    check_model(body.model, ctx)
    if not body.messages:
        return _load_order(body, ctx, {"message": {"role": "assistant", "content": ""}})
    chat = ChatRequestBuilder(fields=_chat_fields(body, ctx))
    _add_messages(chat, body.messages)
    for index, tool in enumerate(body.tools or ()):
        function = tool.get("function") if tool.get("type", "function") == "function" else None
        if not isinstance(function, dict):
            raise bad_parameter(f"tools[{index}].function", "is missing; send functions")
        chat.add_tool(function, f"tools[{index}]")
    return _with_ignored(chat.read(ctx, _NAMES), OllamaChatBody, fields, body)


def parse_ollama_generate(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest | ModelLoadRequest:
    """Parse the body of Ollama's /api/generate."""
    body = to_record(OllamaGenerateBody, fields, RULES)
    check_model(body.model, ctx)
    if not body.prompt:
        return _load_order(body, ctx, {"response": ""})
    if body.raw or body.suffix or ctx.template is None:
        for name, given in (("system", body.system), ("context", body.context), ("images", body.images)):
            if given:
                raise bad_parameter(
                    name, "cannot be used with raw or suffix; leave it out, or leave raw and suffix out"
                )
        return _with_ignored(_read_raw(body, ctx), OllamaGenerateBody, fields, body)
    chat = ChatRequestBuilder(fields=_chat_fields(body, ctx))
    if body.system:
        chat.add_message({"role": "system", "content": body.system}, "system")
    chat.add_message({"role": "user", "content": _content(body.prompt, body.images, "")}, "prompt")
    if body.context and body.images:
        raise bad_parameter("images", "cannot be used with context; leave one of them out")
    prepared = _with_context(chat.read(ctx, _NAMES | {"messages": "prompt"}), body.context or [], ctx)
    return _with_ignored(prepared, OllamaGenerateBody, fields, body)


def parse_embed(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest | bytes:
    """Create embeddings of texts, as Ollama's API does."""
    body = to_record(EmbedBody, fields, RULES)
    check_model(body.model, ctx)
    if not body.input:
        return msgspec.json.encode({"model": ctx.model.name, "embeddings": []})
    texts = read_texts([*body.input] if isinstance(body.input, list) else body.input, "input", ctx,
                       max_tokens=None if body.truncate is False else -1)  # fmt: skip
    options = EmbeddingOptions(dimensions=check_dimensions(body.dimensions or None, ctx))
    prepared = prepare_texts(texts, options, ctx, ignored(EmbedBody, fields, RULES))
    return prepared.with_options(keep_alive_s=keep_alive(body.keep_alive))


def parse_old_embeddings(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest | bytes:
    """Create the embedding of a text, as Ollama's older API does."""
    body = to_record(OldEmbeddingsBody, fields, RULES)
    check_model(body.model, ctx)
    if not body.prompt:
        return msgspec.json.encode({"embedding": []})
    texts = read_texts(body.prompt, "prompt", ctx, max_tokens=-1)
    options = EmbeddingOptions(normalize=False)
    prepared = prepare_texts(texts, options, ctx, ignored(OldEmbeddingsBody, fields, RULES))
    return prepared.with_options(keep_alive_s=keep_alive(body.keep_alive))


def parse_show(fields: dict[str, Any], ctx: ModelContext) -> bytes:
    """Check a body of /api/show; the response does not depend on it."""
    body = to_record(ShowBody, fields, RULES)
    check_model(body.model or body.name, ctx)
    return b""


def _load_order(body: OllamaBody, ctx: ModelContext, what: dict[str, object]) -> ModelLoadRequest:
    """Return an order to load or unload the model, with its response."""
    keep_alive_s = keep_alive(body.keep_alive)
    head = {"model": ctx.model.name, "created_at": created_at(time.time())}
    rest = {"done_reason": "unload" if keep_alive_s == 0 else "load", "done": True}
    return ModelLoadRequest(msgspec.json.encode({**head, **what, **rest}), keep_alive_s)


MAX_KEEP_ALIVE_S: Final = 100 * 365 * 86400.0
"""Longest `keep_alive`; a longer one counts as this one."""
_SECONDS: Final = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
_DURATION: Final = re.compile(rf"({_SECONDS.pattern})(ns|us|µs|ms|s|m|h)")
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def keep_alive(value: float | str | None) -> float | None:
    """Return `keep_alive` in seconds: a number, or a duration of Go such as "5m" or "1h30m"; raises ApiError."""
    if value is None:
        return None
    if isinstance(value, float | int):
        return min(value, MAX_KEEP_ALIVE_S)
    text = value.strip()
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    written = f"{digits}s" if _SECONDS.fullmatch(digits) else digits
    parts = _DURATION.findall(written)
    if not parts or "".join(number + unit for number, unit in parts) != written:
        raise bad_parameter("keep_alive", f'{show(value)} is no duration; send seconds, or text such as "5m"')
    return min(sign * sum(float(number) * _UNITS[unit] for number, unit in parts), MAX_KEEP_ALIVE_S)


def _with_ignored(
    prepared: PreparedRequest, kind: type[OllamaBody], fields: dict[str, Any], body: OllamaBody
) -> PreparedRequest:
    idle = [f"options.{name}" for name in body.options or () if name not in OPTIONS]
    return prepared.with_options(ignored=ignored(kind, fields, RULES, idle), keep_alive_s=keep_alive(body.keep_alive))


def _read_raw(body: OllamaGenerateBody, ctx: ModelContext) -> PreparedRequest:
    fields = _chat_fields(body, ctx)
    logprobs = fields.pop("top_logprobs", 0) if fields.pop("logprobs", None) else None
    for name in ("enable_thinking", "reasoning_effort", "top_logprobs"):
        fields.pop(name, None)
    prompt = infill_ids(body.prompt or "", body.suffix, (), "suffix", ctx) if body.suffix else body.prompt
    try:
        return parse_completion({**fields, "prompt": prompt, "logprobs": logprobs}, ctx)
    except ApiError as error:
        raise error.renamed(_NAMES.get(error.param or "", error.param or "")) from None


def _with_context(prepared: PreparedRequest, context: list[int], ctx: ModelContext) -> PreparedRequest:
    """Put the ids of an earlier conversation before the prompt; raises ApiError."""
    if not context:
        return prepared
    added = prepared.prompts[0]
    starts_again = added[:1] == (ctx.tokenizer.bos,)
    n_before = len(context) - starts_again
    ids = (*check_token_ids(context, "context", ctx), *added[starts_again:])
    check_tokens(len(ids), "context", ctx)
    turn_ends = [len(context), *(n_before + end for end in prepared.options.turn_ends[0])]
    return replace(prepared, prompts=[ids]).with_options(turn_ends=[turn_ends], roles=[[]])


def _chat_fields(body: OllamaBody, ctx: ModelContext) -> dict[str, Any]:
    fields: dict[str, Any] = {"stream": body.stream is not False}
    if body.logprobs or body.top_logprobs is not None:
        fields |= {"logprobs": bool(body.logprobs), "top_logprobs": body.top_logprobs}
    if isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    elif body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        raise bad_parameter("format", f'{show(body.format)} is not a format; send "json" or a JSON schema')
    for name, value in (body.options or {}).items():
        if name in OPTIONS:
            whole = isinstance(value, float) and value.is_integer()  # clients in JavaScript and Go write 5.0
            fields[OPTIONS[name]] = int(value) if whole else value
        else:
            to_record(_Options, {name: value}, RULES)
    if isinstance(wished := fields.get("max_tokens"), int) and wished <= 0:  # -1, -2: without a limit
        del fields["max_tokens"]
    if fields.get("stop") == []:
        del fields["stop"]
    return fields | _thinking(body, ctx)


_Options = msgspec.defstruct("_Options", [(name, object, None) for name in OPTIONS])


def _thinking(body: OllamaBody, ctx: ModelContext) -> dict[str, Any]:
    source = "" if ctx.template is None else ctx.template.source
    if body.think is None:
        return {}
    if isinstance(body.think, str):
        if body.think not in _EFFORTS:
            raise bad_parameter(
                "think", f"{show(body.think)} is not a level; send true, false or {', '.join(_EFFORTS)}"
            )
        return {"reasoning_effort": body.think} if "enable_thinking" in source or "reasoning_effort" in source else {}
    return {"enable_thinking": body.think} if "enable_thinking" in source else {}


def _add_messages(chat: ChatRequestBuilder, messages: Sequence[dict[str, Any]]) -> None:
    """Append the messages.  Calls have no ids in this API: results answer them in their order."""
    waiting: list[tuple[str, str]] = []  # name and id of calls without a result
    for index, raw in enumerate(messages):
        where = f"messages[{index}]"
        message = convert(OllamaMessage, raw, where)
        made: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images, where)}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            ids = [call.id or f"call_{index}_{i}" for i, call in enumerate(message.tool_calls)]
            waiting = [(call.function.name, id_) for call, id_ in zip(message.tool_calls, ids, strict=True)]
            made["tool_calls"] = [
                {"id": id_, "type": "function", "function": msgspec.to_builtins(call.function)}
                for call, id_ in zip(message.tool_calls, ids, strict=True)
            ]
        if message.role == "tool":
            answered = next((item for item in waiting if message.tool_name in (None, item[0])), None)
            if answered is not None:
                waiting.remove(answered)
            made["tool_call_id"] = message.tool_call_id or (answered[1] if answered else f"call_{index}")
        chat.add_message(made, where)


def _content(text: str | None, images: Sequence[Any] | None, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a message with images, which come first; they are base64 without more in this API."""
    if not images:
        return text or ""
    parts = []
    for index, image in enumerate(images):
        place = f"{where}.images[{index}]" if where else f"images[{index}]"
        if not isinstance(image, str):
            raise bad_parameter(place, "is not a string; send the image as base64", "invalid_image")
        named = image.startswith(("data:", "file:", "http:", "https:"))
        parts.append(image_part(image if named else f"data:image/any;base64,{image}", place))
    return [*parts, *([{"type": "text", "text": text}] if text else [])]


_DONE_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "tool_calls": "stop"}


def created_at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaFormatter(ResponseFormatter):
    """Formatter of /api/chat."""

    style = "lines"
    chat = True
    _reason: FinishReason = "stop"
    context: list[int] | None = None
    """Ids of the conversation so far, None if they are not sent."""

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[object]:
        self._record(delta)
        if delta.event is None and not (self.options.logprobs and delta.tokens):
            return ()
        return [self._object([delta], done=False)]

    def end(self, totals: UsageTotals) -> Sequence[object]:
        return [self._object([], done=True) | self._counts(totals)]

    def failure(self, error: ApiError) -> Sequence[object]:
        return [error.ollama_body()]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        for delta in choices[0]:
            self._record(delta)
        return self._object(choices[0], done=True) | self._counts(totals)

    def _record(self, delta: ChoiceDelta) -> None:
        self._reason = delta.finish_reason or self._reason
        if self.context is not None:
            self.context += delta.token_ids

    def _object(self, deltas: Sequence[ChoiceDelta], *, done: bool) -> dict[str, object]:
        events = [delta.event for delta in deltas]
        content = "".join(event.text for event in events if isinstance(event, ContentDelta))
        thinking = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        calls = [self._call(event) for event in events if isinstance(event, ToolCallDelta)]
        result: dict[str, object] = {"model": self.card.name, "created_at": created_at(time.time())}
        part: dict[str, object] = {"role": "assistant", "content": content} if self.chat else {"response": content}
        if thinking:
            part["thinking"] = thinking
        if calls:
            part["tool_calls"] = calls
        result |= {"message": part} if self.chat else part
        tokens = [token for delta in deltas for token in delta.tokens]
        if self.options.logprobs and tokens:
            result["logprobs"] = chat_logprobs(self.tokenizer, tokens)["content"]
        return result | {"done": done}

    def _call(self, call: ToolCallDelta) -> dict[str, object]:
        function = {"index": call.index, "name": call.name, "arguments": msgspec.Raw(call.arguments.encode())}
        return {"id": f"call_{self.unique_id}{call.index:02d}", "function": function}

    def _counts(self, totals: UsageTotals) -> dict[str, object]:
        times = totals.timings_json()
        queue, prefill, decode = (int(1e9 * times.get(f"{name}_s", 0.0)) for name in ("queue", "prefill", "decode"))
        return {
            "done_reason": _DONE_REASONS[self._reason],
            **({} if self.context is None else {"context": self.context}),
            "total_duration": queue + prefill + decode,
            "load_duration": queue,  # as in Ollama, all the time before the model runs
            "prompt_eval_count": totals.prompt,
            "prompt_eval_duration": prefill,
            "eval_count": totals.generated,
            "eval_duration": decode,
        }


class OllamaGenerateFormatter(OllamaFormatter):
    """Formatter of /api/generate."""

    prompt_param = "prompt"
    chat = False

    def __init__(self, prepared: PreparedRequest, ctx: ModelContext) -> None:
        super().__init__(prepared, ctx)
        self.context = None if self.options.plain else list(prepared.prompts[0])


OLLAMA_VERSION: Final = "0.14.0"
"""Release of Ollama whose paths and fields are implemented.  Clients refuse servers that report an older one.

Codex wants 0.13.4, the first with /v1/responses; 0.14.0 is the first with /v1/messages.
"""


async def embed(request: web.Request) -> web.Response:
    """Create embeddings of texts, as Ollama's API does."""
    prepared, started_s = await prepare_request(request, parse_embed), time.monotonic()
    if not isinstance(prepared, PreparedRequest):
        return web.Response(body=prepared, content_type="application/json")
    ctx = model_of(request)
    vectors = await embeddings_of(request, prepared, "input")
    body = {
        "model": ctx.model.name,
        "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": int(1e9 * (time.monotonic() - started_s)),
        "load_duration": int(1e9 * context_of(request).queue_s),
        "prompt_eval_count": sum(map(len, prepared.prompts)),
    }
    return answer(await asyncio.to_thread(msgspec.json.encode, body), prepared)


async def old_embeddings(request: web.Request) -> web.Response:
    """Create the embedding of a text, as Ollama's older API does."""
    prepared = await prepare_request(request, parse_old_embeddings)
    if not isinstance(prepared, PreparedRequest):
        return web.Response(body=prepared, content_type="application/json")
    [vector] = await embeddings_of(request, prepared, "prompt")
    return answer(msgspec.json.encode({"embedding": vector.tolist()}), prepared)


async def root(request: web.Request) -> web.Response:
    """Return the status page, or "Ollama is running" to Ollama's own clients, which check for it."""
    if request.headers.get("User-Agent", "").startswith("ollama"):
        return web.Response(text="Ollama is running")
    return await page(request)


async def tags(request: web.Request) -> web.Response:
    """List the served models, as Ollama's API does."""
    return json_response({"models": [_model(ctx) for ctx in request.app[MODELS].listed()]})


async def running(request: web.Request) -> web.Response:
    """List the loaded models, as Ollama's API does, and when they are unloaded if nobody asks."""
    loaded = [
        {**_model(ctx), "expires_at": _expires_at(ctx), "size_vram": ctx.model.size_bytes,
         "context_length": ctx.max_context}
        for ctx in request.app[MODELS] if ctx.model_state in ("loaded", "leaving")
    ]  # fmt: skip
    return json_response({"models": loaded})


def _expires_at(ctx: ModelContext) -> str:
    seconds = None if ctx.control is None else ctx.control.unloads_in_s
    return "9999-12-31T23:59:59Z" if seconds is None else created_at(time.time() + seconds)


async def show_model(request: web.Request) -> web.StreamResponse:
    """Describe the served model, as Ollama's API does."""
    await prepare_request(request, parse_show)
    ctx = model_of(request)
    card, template = ctx.model, ctx.template
    able = abilities(ctx)
    if able["completions"]:
        capabilities = ["completion", *(name for name in ("tools", "thinking") if able[name])]
    else:
        capabilities = ["embedding"] if able["embeddings"] else []
    if able["completions"] and InfillTokens.of(ctx.tokenizer) is not None:
        capabilities.append("insert")
    return json_response(
        {
            "modelfile": "",
            "parameters": "\n".join(f"{k} {v}" for k, v in msgspec.to_builtins(ctx.defaults).items()),
            "template": "" if template is None else template.source,
            "modified_at": created_at(card.created_s),
            "details": _details(ctx),
            "model_info": {
                "general.basename": card.name,
                **card.facts,
                "general.architecture": card.architecture,
                "general.parameter_count": card.n_parameters,
                f"{card.architecture}.context_length": ctx.max_context,
            },
            "capabilities": capabilities,
        }
    )


async def version(_: web.Request) -> web.Response:
    """Return the release of Ollama whose fields /api/ has."""
    return json_response({"version": OLLAMA_VERSION, "lucevisor": __version__})


def _model(ctx: ModelContext) -> dict[str, object]:
    card = ctx.model
    return {
        "name": card.tagged,
        "model": card.tagged,
        "modified_at": created_at(card.created_s),
        "size": card.size_bytes,
        "digest": _digest(card),
        "details": _details(ctx),
    }


def _digest(card: ModelCard) -> str:
    """Return 64 hexadecimal digits that identify the file.  They are not its SHA-256, which would take minutes."""
    return hashlib.sha256(f"{card.name} {card.path} {card.size_bytes} {card.created_s}".encode()).hexdigest()


def _rounded(n_parameters: int) -> str:
    if n_parameters >= 1e9:
        return f"{n_parameters / 1e9:.1f}B"
    return f"{n_parameters / 1e6:.2f}M"


def _details(ctx: ModelContext) -> dict[str, object]:
    card = ctx.model
    return {
        "parent_model": "",
        "format": "gguf",
        "family": card.architecture,
        "families": [card.architecture],
        "parameter_size": _rounded(card.n_parameters),
        "quantization_level": card.quant,
    }
