"""GET /openapi.json, with request bodies generated from the types that decode them.

Invariant: a parameter is in the document if and only if the server accepts it.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import msgspec
from aiohttp import web

from lucevisor import __version__
from lucevisor.api.dialects.anthropic import CountTokensBody, MessagesBody
from lucevisor.api.dialects.llamacpp import DetokenizeBody, InfillBody, LlamaCompletionBody, TokenizeBody
from lucevisor.api.dialects.ollama import OllamaChatBody, OllamaGenerateBody, ShowBody
from lucevisor.api.dialects.openai_chat import ChatBody
from lucevisor.api.dialects.openai_completions import CompletionBody
from lucevisor.api.dialects.openai_responses import ResponsesBody
from lucevisor.api.info import RestartBody

_BODIES: Final[dict[str, tuple[type[msgspec.Struct], str]]] = {
    "/v1/chat/completions": (ChatBody, "Create a chat completion."),
    "/v1/completions": (CompletionBody, "Create a completion of a text or of token ids."),
    "/v1/messages": (MessagesBody, "Create a message, as Anthropic's API does."),
    "/v1/messages/count_tokens": (CountTokensBody, "Count the tokens of a prompt."),
    "/v1/responses": (ResponsesBody, "Create a response, as OpenAI's Responses API does."),
    "/v1/responses/input_tokens": (ResponsesBody, "Count the tokens of a response's prompt."),
    "/api/chat": (OllamaChatBody, "Continue a chat, as Ollama's API does."),
    "/api/generate": (OllamaGenerateBody, "Continue a prompt, as Ollama's API does."),
    "/api/show": (ShowBody, "Describe the served model, as Ollama's API does."),
    "/chat/completions": (ChatBody, "Create a chat completion, as /v1/chat/completions does."),
    "/responses": (ResponsesBody, "Create a response, as /v1/responses does."),
    "/completion": (LlamaCompletionBody, "Continue a prompt, as llama.cpp's server does."),
    "/completions": (LlamaCompletionBody, "Continue a prompt, as llama.cpp's server does."),
    "/infill": (InfillBody, "Fill a gap in a text, as llama.cpp's server does."),
    "/apply-template": (ChatBody, "Return the prompt of a chat request as text."),
    "/tokenize": (TokenizeBody, "Convert a text to token ids."),
    "/detokenize": (DetokenizeBody, "Convert token ids to text."),
    "/admin/restart": (RestartBody, "Begin the restart of a group's daemon; needs an admin key."),
}
_READS: Final = {
    "/v1/models": "List the served model.",
    "/models": "List the served model, as /v1/models does.",
    "/v1/models/{id}": "Describe one model.",
    "/v1/responses/{id}": "Return a stored response, or its events.",
    "/v1/responses/{id}/input_items": "List the items that a stored response answers.",
    "/api/tags": "List the served model, as Ollama's API does.",
    "/api/ps": "List the loaded model, as Ollama's API does.",
    "/api/version": "Return the release of Ollama whose fields /api/ has.",
    "/props": "Return the server's properties.",
    "/slots": "List the slots for sequences, as llama.cpp's server does.",
    "/health": "Return 200 while the server is alive.",
    "/v1/health": "Return 200 while the server is alive, as /health does.",
    "/ready": "Return whether the pipeline is ready, and what is not.",
    "/metrics": "Return the metrics for Prometheus.",
    "/openapi.json": "Return this document.",
    "/": "Return the status page.",
    "/status": "Return the status, as `lucevisor status --json` prints it.",
}
_QUERIES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "/v1/responses/{id}": {"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
    "/slots": {"fail_on_no_slot": {}},
    "/v1/responses/{id}/input_items": {
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "order": {"enum": ["asc", "desc"]},
        "after": {"type": "string"},
    },
}
_ADMIN: Final = frozenset({"/admin/restart"})
_STREAMED: Final = frozenset(
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
        *("/chat/completions", "/responses", "/completion", "/completions", "/infill"),
    ]
)
_LINES: Final = frozenset({"/api/chat", "/api/generate"})
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
_POST_ERRORS: Final = ("400", "401", "404", "413", "429", "503")
_ADMIN_ERRORS: Final = ("400", "401", "403", "409", "413")


async def openapi(_: web.Request) -> web.Response:
    """Return the document."""
    return web.Response(body=_document(), content_type="application/json")


@functools.cache
def _document() -> bytes:
    _, schemas = msgspec.json.schema_components(
        [kind for kind, _ in _BODIES.values()], ref_template="#/components/schemas/{name}"
    )
    nullable_text = {"type": ["string", "null"]}
    fields = {"message": _TEXT, "type": _TEXT, "param": nullable_text, "code": nullable_text}
    error = {"type": "object", "required": list(fields), "properties": fields}
    schemas["Error"] = {"type": "object", "required": ["error"], "properties": {"error": error}}
    schemas["AnthropicError"] = _ANTHROPIC_ERROR
    schemas["OllamaError"] = {"type": "object", "required": ["error"], "properties": {"error": _TEXT}}
    paths: dict[str, Any] = {path: {"post": _post(path, *body)} for path, body in _BODIES.items()}
    paths |= {path: {"get": _simple(path, "get", summary)} for path, summary in _READS.items()}
    paths["/v1/responses/{id}"]["delete"] = _simple("/v1/responses/{id}", "delete", "Forget a stored response.")
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


def _post(path: str, kind: type[msgspec.Struct], summary: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in _LINES:
        content["application/x-ndjson"] = {}
    if path in _STREAMED:
        content["text/event-stream"] = {}  # events, which OpenAPI 3.1 cannot describe
    body = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_").replace("-", "_"),
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {
            "202" if path in _ADMIN else "200": {"description": "The answer.", "content": content},
            **_error_responses(path, _ADMIN_ERRORS if path in _ADMIN else _POST_ERRORS),
        },
    }


def _simple(path: str, method: str, summary: str) -> dict[str, Any]:
    """Return an operation without a body."""
    name = path.strip("/").replace("/", "_").replace("{id}", "one").replace(".", "_") or "page"
    queries = _QUERIES.get(path, {}) if method == "get" else {}
    ids = "{id}" in path
    statuses = (*(("400",) if queries and ids else ()), "401", *(("404",) if ids else ("503",) if queries else ()))
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": name if method == "get" else f"{method}_{name}",
        "responses": {"200": {"description": "The answer."}, **_error_responses(path, statuses)},
    }
    parameters: list[dict[str, Any]] = [{"name": name, "in": "query", "schema": queries[name]} for name in queries]
    if ids:
        parameters.insert(0, {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        operation["parameters"] = parameters
    return operation


def _error_responses(path: str, statuses: tuple[str, ...]) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    name = "OllamaError" if path.startswith("/api/") else name
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}
