"""The routes of the API, and GET /openapi.json, which is made of the types that decode the bodies."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web

from lucevisor import __version__
from lucevisor.api import info
from lucevisor.api.access import ADMIN_PATHS, OLLAMA_PATHS
from lucevisor.api.contexts import BodyParser
from lucevisor.api.dialects import anthropic, decisions, llamacpp, ollama, rerank
from lucevisor.api.dialects import openai_embeddings as embeddings
from lucevisor.api.dialects import openai_responses as responses
from lucevisor.api.dialects.openai_chat import ChatBody, ChatFormatter, parse_apply_template, parse_chat
from lucevisor.api.dialects.openai_completions import CompletionBody, CompletionFormatter, parse_completion
from lucevisor.api.generation import ResponseFormatter, handle_generation
from lucevisor.api.sse import CONTENT_TYPES


@dataclass(frozen=True, slots=True)
class Route:
    """A path and its handler.  `stream`: content type of its streams."""

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    summary: str
    body: type[msgspec.Struct] | None = None
    stream: str = ""


def _route(method: str, path: str, handler: Any, body: type[msgspec.Struct] | None = None, stream: str = "") -> Route:
    return Route(method, path, handler, _summary(handler), body, stream)


def _answers(
    path: str,
    parser: BodyParser,
    body: type[msgspec.Struct],
    formatter: type[ResponseFormatter] | None = None,
    summary: str = "",
) -> Route:
    """Return the route of a request that the model answers, or, without a formatter and a summary, its parser alone."""
    handler = functools.partial(handle_generation, parser=parser, make_formatter=formatter)
    style = CONTENT_TYPES[formatter.style] if formatter else ""
    return Route("POST", path, handler, summary or _summary(parser), body, style)


def _summary(function: Any) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


async def openapi(_: web.Request) -> web.Response:
    """Return this document."""
    return web.Response(body=_document(), content_type="application/json")


_EVENTS: Final = CONTENT_TYPES["data"]
_CHAT: Final = (parse_chat, ChatBody, ChatFormatter, "Create a chat completion.")
_COMPLETION: Final = (
    llamacpp.parse_llama_completion, llamacpp.LlamaCompletionBody, llamacpp.LlamaCppFormatter,
    "Continue a prompt, as llama.cpp's server does.",
)  # fmt: skip
ROUTES: Final = (
    _answers("/v1/chat/completions", *_CHAT),
    _answers(
        "/v1/completions",
        parse_completion,
        CompletionBody,
        CompletionFormatter,
        "Create a completion of a text or of token ids.",
    ),
    _answers(
        "/v1/messages",
        anthropic.parse_messages,
        anthropic.MessagesBody,
        anthropic.MessageFormatter,
        "Create a message, as Anthropic's API does.",
    ),
    _route("POST", "/v1/embeddings", embeddings.create_embeddings, embeddings.EmbeddingsBody),
    *(_route("POST", path, rerank.create_rerank, rerank.RerankBody) for path in rerank.PATHS),
    _route("POST", "/v1/decisions", decisions.create_decision, decisions.DecisionsBody),
    _route("POST", "/v1/systemone", decisions.system_one, decisions.SystemOneBody),
    _answers("/v1/messages/count_tokens", anthropic.parse_count_tokens, anthropic.CountTokensBody),
    _route("POST", "/v1/responses", responses.create_response, responses.ResponsesBody, _EVENTS),
    _route("POST", "/v1/responses/input_tokens", responses.count_input_tokens, responses.ResponsesBody),
    _route("GET", "/v1/responses/{id}", responses.get_response),
    _route("DELETE", "/v1/responses/{id}", responses.delete_response),
    _route("GET", "/v1/models", info.models),
    _route("GET", "/v1/models/{id:.+}", info.model),
    _answers(
        "/api/chat",
        ollama.parse_ollama_chat,
        ollama.OllamaChatBody,
        ollama.OllamaFormatter,
        "Continue a chat, as Ollama's API does.",
    ),
    _answers(
        "/api/generate",
        ollama.parse_ollama_generate,
        ollama.OllamaGenerateBody,
        ollama.OllamaGenerateFormatter,
        "Continue a prompt, as Ollama's API does.",
    ),
    _route("POST", "/api/embed", ollama.embed, ollama.EmbedBody),
    _route("POST", "/api/embeddings", ollama.old_embeddings, ollama.OldEmbeddingsBody),
    _route("POST", "/api/show", ollama.show_model, ollama.ShowBody),
    _route("GET", "/api/tags", ollama.tags),
    _route("GET", "/api/ps", ollama.running),
    _route("GET", "/api/version", ollama.version),
    _answers("/chat/completions", *_CHAT),  # llama.cpp has these without /v1, too
    _route("POST", "/responses", responses.create_response, responses.ResponsesBody, _EVENTS),
    _route("GET", "/models", info.models),
    _route("POST", "/models/load", info.load_model, info.ModelBody),
    _route("POST", "/models/unload", info.unload_model, info.ModelBody),
    _route("GET", "/v1/health", info.health),
    _answers("/completion", *_COMPLETION),
    _answers("/completions", *_COMPLETION),
    _answers(
        "/infill",
        llamacpp.parse_infill,
        llamacpp.InfillBody,
        llamacpp.InfillFormatter,
        "Fill a gap in a text, as llama.cpp's server does.",
    ),
    _route("POST", "/embedding", llamacpp.create_embedding, llamacpp.EmbeddingBody),
    _route("POST", "/embeddings", llamacpp.create_embedding, llamacpp.EmbeddingBody),
    _answers("/apply-template", parse_apply_template, ChatBody),
    _answers("/tokenize", llamacpp.parse_tokenize, llamacpp.TokenizeBody),
    _answers("/detokenize", llamacpp.parse_detokenize, llamacpp.DetokenizeBody),
    _route("GET", "/props", info.props),
    _route("GET", "/slots", info.slots),
    _route("GET", "/lora-adapters", info.lora_adapters),
    _route("GET", "/health", info.health),
    _route("GET", "/ready", info.ready),
    _route("GET", "/metrics", info.metrics),
    _route("GET", "/openapi.json", openapi),
    _route("GET", "/", ollama.root),
    _route("GET", "/status", info.status),
    _route("POST", "/admin/restart", info.restart, info.RestartBody),
)
_TEXT: Final = {"type": "string"}
_ANTHROPIC_ERROR: Final = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
        "request_id": _TEXT,
    },
}


@functools.cache
def _document() -> bytes:
    bodies = [route.body for route in ROUTES if route.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    nullable_text = {"type": ["string", "null"]}
    fields = {"message": _TEXT, "type": _TEXT, "param": nullable_text, "code": nullable_text}
    error = {"type": "object", "required": list(fields), "properties": fields}
    schemas["Error"] = {"type": "object", "required": ["error"], "properties": {"error": error}}
    schemas["AnthropicError"] = _ANTHROPIC_ERROR
    schemas["OllamaError"] = {"type": "object", "required": ["error"], "properties": {"error": _TEXT}}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        path = re.sub(r":[^}]*\}", "}", route.path)  # without patterns
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Lucevisor", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {
                    "key": {"type": "http", "scheme": "bearer"},
                    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{}, {"key": []}, {"header": []}],
        }
    )


def _operation(route: Route, path: str) -> dict[str, Any]:
    name = path.strip("/").replace("/", "_").replace("{id}", "one")
    name = (name.replace("-", "_") if route.body else name.replace(".", "_")) or "page"
    answer: dict[str, Any] = {"description": "The answer."}
    has_id = "{id}" in path
    status = "202" if path.startswith(ADMIN_PATHS) else "200"
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"delete_{name}" if route.method == "DELETE" else name,
        "responses": {status: answer, "default": _error(path)},
    }
    if route.body is not None:
        schema = {"schema": {"$ref": f"#/components/schemas/{route.body.__name__}"}}
        operation["requestBody"] = {"required": True, "content": {"application/json": schema}}
        answer["content"] = {"application/json": {"schema": {"type": "object"}}}
        if route.stream:
            answer["content"][route.stream] = {}
    if has_id:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": _TEXT}]
    elif path == "/slots":
        operation["parameters"] = [{"name": "fail_on_no_slot", "in": "query", "schema": {}}]
    return operation


def _error(path: str) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    name = "OllamaError" if path.startswith(OLLAMA_PATHS) else name
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {
        "description": "An error, whose message says what to do.",
        "content": {"application/json": {"schema": schema}},
    }
