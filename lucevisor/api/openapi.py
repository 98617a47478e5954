"""The routes of the API, and GET /openapi.json, which describes them.

Summaries are those of the handlers, and request bodies are generated from the types that decode them, so a parameter
is in the document if and only if the server accepts it.
"""

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
from lucevisor.api.dialects import anthropic, llamacpp, ollama
from lucevisor.api.dialects import openai_responses as responses
from lucevisor.api.dialects.openai_chat import ChatBody, chat_completions
from lucevisor.api.dialects.openai_completions import CompletionBody, completions

_EVENTS: Final = "text/event-stream"  # events cannot be described in OpenAPI 3.1
_LINES: Final = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Route:
    """A path and its handler.  `stream`: content type of its streams."""

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    body: type[msgspec.Struct] | None = None
    stream: str = ""


def _post(path: str, handler: Any, body: type[msgspec.Struct], stream: str = "") -> Route:
    return Route("POST", path, handler, body, stream)


def _get(path: str, handler: Any) -> Route:
    return Route("GET", path, handler)


async def openapi(_: web.Request) -> web.Response:
    """Return this document."""
    return web.Response(body=_document(), content_type="application/json")


ROUTES: Final = (
    _post("/v1/chat/completions", chat_completions, ChatBody, _EVENTS),
    _post("/v1/completions", completions, CompletionBody, _EVENTS),
    _post("/v1/messages", anthropic.messages, anthropic.MessagesBody, _EVENTS),
    _post("/v1/messages/count_tokens", anthropic.count_tokens, anthropic.CountTokensBody),
    _post("/v1/responses", responses.create_response, responses.ResponsesBody, _EVENTS),
    _post("/v1/responses/input_tokens", responses.count_input_tokens, responses.ResponsesBody),
    _get("/v1/responses/{id}", responses.get_response),
    _get("/v1/responses/{id}/input_items", responses.list_input_items),
    Route("DELETE", "/v1/responses/{id}", responses.delete_response),
    _get("/v1/models", info.models),
    _get("/v1/models/{id:.+}", info.model),
    _post("/api/chat", ollama.ollama_chat, ollama.OllamaChatBody, _LINES),
    _post("/api/generate", ollama.ollama_generate, ollama.OllamaGenerateBody, _LINES),
    _post("/api/show", ollama.show_model, ollama.ShowBody),
    _get("/api/tags", ollama.tags),
    _get("/api/ps", ollama.running),
    _get("/api/version", ollama.version),
    _post("/chat/completions", chat_completions, ChatBody, _EVENTS),  # llama.cpp has these without /v1, too
    _post("/responses", responses.create_response, responses.ResponsesBody, _EVENTS),
    _get("/models", info.models),
    _get("/v1/health", info.health),
    _post("/completion", llamacpp.completion, llamacpp.LlamaCompletionBody, _EVENTS),
    _post("/completions", llamacpp.completion, llamacpp.LlamaCompletionBody, _EVENTS),
    _post("/infill", llamacpp.infill, llamacpp.InfillBody, _EVENTS),
    _post("/apply-template", llamacpp.apply_template, ChatBody),
    _post("/tokenize", llamacpp.tokenize, llamacpp.TokenizeBody),
    _post("/detokenize", llamacpp.detokenize, llamacpp.DetokenizeBody),
    _get("/props", info.props),
    _get("/slots", info.slots),
    _get("/health", info.health),
    _get("/ready", info.ready),
    _get("/metrics", info.metrics),
    _get("/openapi.json", openapi),
    _get("/", ollama.root),
    _get("/status", info.status),
    _post("/admin/restart", info.restart, info.RestartBody),
)
_QUERIES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "/v1/responses/{id}": {"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
    "/slots": {"fail_on_no_slot": {}},
    "/v1/responses/{id}/input_items": {
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "order": {"enum": ["asc", "desc"]},
        "after": {"type": "string"},
    },
}
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
_ERRORS: Final = {
    "400": "A parameter is invalid; the error names it.",
    "401": "The API key is missing or wrong.",
    "403": "No admin key is configured.",
    "404": "The model is not served here, or the response is not stored.",
    "409": "The group is not known, or the supervisor is stopping.",
    "413": "The body is too large.",
    "429": "The queue is full; retry after Retry-After seconds.",
    "503": "The pipeline is not ready; retry after Retry-After seconds.",
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
    queries = _QUERIES.get(path, {}) if route.method == "GET" else {}
    answer: dict[str, Any] = {"description": "The answer."}
    status, has_id = "200", "{id}" in path
    if path.startswith(ADMIN_PATHS):
        status, errors = "202", ["400", "401", "403", "409", "413"]
    elif route.body is not None:
        errors = ["400", "401", "404", "413", "429", "503"]
    else:
        errors = [*(["400"] if queries and has_id else []), "401"]
        errors += ["404"] if has_id else ["503"] if queries else []
    operation: dict[str, Any] = {
        "summary": (inspect.getdoc(route.handler) or "").partition("\n")[0],
        "operationId": f"delete_{name}" if route.method == "DELETE" else name,
        "responses": {status: answer, **_error_responses(path, errors)},
    }
    if route.body is not None:
        schema = {"schema": {"$ref": f"#/components/schemas/{route.body.__name__}"}}
        operation["requestBody"] = {"required": True, "content": {"application/json": schema}}
        answer["content"] = {"application/json": {"schema": {"type": "object"}}}
        if route.stream:
            answer["content"][route.stream] = {}
    parameters: list[dict[str, Any]] = (
        [{"name": "id", "in": "path", "required": True, "schema": _TEXT}] if has_id else []
    )
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in queries.items()]
    if parameters:
        operation["parameters"] = parameters
    return operation


def _error_responses(path: str, statuses: list[str]) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    name = "OllamaError" if path.startswith(OLLAMA_PATHS) else name
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}
