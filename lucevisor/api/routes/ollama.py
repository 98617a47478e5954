"""Ollama's API, below /api/: chat, generate, and what its clients ask about models."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec
from aiohttp import web

from lucevisor import __version__
from lucevisor.api.context import PORTS
from lucevisor.api.generation.jobs import GenerationPlan, ResponseId, make_jobs
from lucevisor.api.generation.respond import respond
from lucevisor.api.output.ollama import OllamaFormatter, created_at
from lucevisor.api.ports import ModelCard, Ports, Reader
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.prompts.ollama import read_ollama_chat, read_ollama_generate, read_show
from lucevisor.api.prompts.prepare import prepare
from lucevisor.api.routes.chat import chat_output
from lucevisor.api.routes.completions import plain_output
from lucevisor.api.routes.info import abilities
from lucevisor.api.routes.page import page
from lucevisor.text.infill import InfillTokens

OLLAMA_VERSION: Final = "0.14.0"
"""The release of Ollama whose paths and fields are here; clients refuse to talk to servers that look older.

Codex wants 0.13.4, the first with /v1/responses; 0.14.0 is the first with /v1/messages.
"""


async def root(request: web.Request) -> web.Response:
    """GET /: what Ollama's own clients look for, the status page for everybody else."""
    if request.headers.get("User-Agent", "").startswith("ollama"):
        return web.Response(text="Ollama is running")
    return await page(request)


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /api/chat."""
    return await _generated(request, read_ollama_chat)


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /api/generate."""
    return await _generated(request, read_ollama_generate)


async def _generated(request: web.Request, reader: Reader) -> web.StreamResponse:
    prepared = await prepare(request, reader)
    if not isinstance(prepared, PreparedRequest):
        return web.Response(body=b"".join(prepared), content_type="application/json")
    ports, options, response = request.app[PORTS], prepared.options, ResponseId.now("")
    is_chat = reader is read_ollama_chat
    formatter = OllamaFormatter(
        response_id=response.response_id,
        model=ports.model.name,
        tokenizer=ports.tokenizer,
        chat=is_chat,
        logprobs=options.logprobs,
        context=None if is_chat or options.plain else list(prepared.prompts[0]),
    )
    output = plain_output(options) if options.plain else chat_output(options, ports)
    plan = GenerationPlan(
        jobs=make_jobs(prepared, output, ports, response),
        formatter=formatter,
        stream=options.stream,
        prompt_param="messages" if is_chat else "prompt",
        ignored=options.ignored,
    )
    return await respond(request, plan)


async def tags(request: web.Request) -> web.Response:
    """GET /api/tags: the served model."""
    return _json({"models": [_model(request.app[PORTS])]})


async def running(request: web.Request) -> web.Response:
    """GET /api/ps: the served model, which is never unloaded."""
    ports = request.app[PORTS]
    more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": ports.model.size_bytes}
    return _json({"models": [_model(ports) | more | {"context_length": ports.max_context}]})


async def show(request: web.Request) -> web.StreamResponse:
    """POST /api/show."""
    await prepare(request, read_show)
    ports = request.app[PORTS]
    card, template = ports.model, ports.template
    able = abilities(ports)
    capabilities = ["completion", *(name for name in ("tools", "thinking") if able[name])]
    if InfillTokens.of(ports.tokenizer) is not None:
        capabilities.append("insert")
    return _json(
        {
            "modelfile": "",
            "parameters": "\n".join(f"{k} {v}" for k, v in msgspec.to_builtins(ports.defaults).items()),
            "template": "" if template is None else template.source,
            "modified_at": created_at(card.created_s),
            "details": _details(ports),
            "model_info": {
                "general.basename": card.name,
                **card.facts,
                "general.architecture": card.architecture,
                "general.parameter_count": card.n_parameters,
                f"{card.architecture}.context_length": ports.max_context,
            },
            "capabilities": capabilities,
        }
    )


async def version(_: web.Request) -> web.Response:
    """GET /api/version."""
    return _json({"version": OLLAMA_VERSION, "lucevisor": __version__})


def _model(ports: Ports) -> dict[str, object]:
    card = ports.model
    return {
        "name": card.tagged,
        "model": card.tagged,
        "modified_at": created_at(card.created_s),
        "size": card.size_bytes,
        "digest": _digest(card),
        "details": _details(ports),
    }


def _digest(card: ModelCard) -> str:
    """Return the 64 hexadecimal digits by which clients know a file; reading all of it would take minutes."""
    return hashlib.sha256(f"{card.name} {card.path} {card.size_bytes} {card.created_s}".encode()).hexdigest()


def _rounded(n_parameters: int) -> str:
    """Return a number of parameters as Ollama writes it: 7.6B, 22.46M."""
    if n_parameters >= 1e9:
        return f"{n_parameters / 1e9:.1f}B"
    return f"{n_parameters / 1e6:.2f}M"


def _details(ports: Ports) -> dict[str, object]:
    card = ports.model
    return {
        "parent_model": "",
        "format": "gguf",
        "family": card.architecture,
        "families": [card.architecture],
        "parameter_size": _rounded(card.n_parameters),
        "quantization_level": card.quant,
    }


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
