"""Information about the server: models, properties, health, readiness, metrics.

Nothing here runs the model or waits for it.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from aiohttp import web

from lucevisor import __version__
from lucevisor.api.context import METRICS, PORTS
from lucevisor.api.errors import unavailable
from lucevisor.api.ports import Ports
from lucevisor.api.prompts.checks import check_model
from lucevisor.text.output_format import OutputFormat


async def models(request: web.Request) -> web.Response:
    """GET /v1/models, in the shapes of OpenAI's and Anthropic's lists at once."""
    one = _model(request.app[PORTS])
    return _json({"object": "list", "data": [one], "has_more": False, "first_id": one["id"], "last_id": one["id"]})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}; ids may hold slashes."""
    ports = request.app[PORTS]
    check_model(request.match_info["id"], ports)
    return _json(_model(ports))


async def props(request: web.Request) -> web.Response:
    """GET /props: the fields of llama.cpp's server that exist here."""
    ports = request.app[PORTS]
    tokenizer, defaults = ports.tokenizer, ports.defaults
    eos = [tokenizer.decode([i], skip_special=False) for i in sorted(tokenizer.eos_ids)]
    settings: dict[str, object] = {"n_ctx": ports.max_context, "params": msgspec.to_builtins(defaults)}
    if ports.direct_defaults is not None:
        settings["params_without_thinking"] = msgspec.to_builtins(ports.direct_defaults)
    return _json(
        {
            "default_generation_settings": settings,
            "total_slots": ports.max_sequences,
            "model_alias": ports.model.name,
            "model_path": ports.model.path,
            "architecture": ports.model.architecture,
            "quant": ports.model.quant,
            "n_vocab": tokenizer.n_vocab,
            "chat_template": ports.template.source if ports.template is not None else None,
            "bos_token": None if tokenizer.bos is None else tokenizer.decode([tokenizer.bos], skip_special=False),
            "eos_tokens": eos,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"lucevisor {__version__}",
        }
    )


async def slots(request: web.Request) -> web.Response:
    """GET /slots, as llama.cpp's server: one for each sequence, the busy ones first, as they have no fixed places."""
    ports = request.app[PORTS]
    busy = 0
    if ports.engine is not None:
        now = ports.engine.statistics()
        busy = now.running + now.queued
    if "fail_on_no_slot" in request.query and busy >= ports.max_sequences:
        raise unavailable("no slot is available; try again later", ports.retry_after_s(), "no_slot")
    return _json([{"id": i, "n_ctx": ports.max_context, "is_processing": i < busy} for i in range(ports.max_sequences)])


async def health(_: web.Request) -> web.Response:
    """GET /health: 200 as long as the event loop responds."""
    return _json({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 when the pipeline is ready, else 503 naming what is not."""
    parts = request.app[PORTS].not_ready()
    if not parts:
        return _json({"status": "ready"})
    waiting = [{"name": part.name, "state": part.state, "reason": part.reason} for part in parts]
    return _json({"status": "not ready", "not_ready": waiting}, 503)


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, for Prometheus."""
    body, content_type = request.app[METRICS].render(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


def abilities(ports: Ports) -> dict[str, bool]:
    """Return what the model can do with its chat template, by Anthropic's names."""
    template = ports.template
    output = OutputFormat() if template is None else template.output_format
    return {
        "image_input": False,
        "structured_outputs": True,
        "thinking": output.reasoning is not None,
        "tools": template is not None and output.tools is not None and "tools" in template.source,
    }


def _model(ports: Ports) -> dict[str, object]:
    """Return the model with OpenAI's fields, vLLM's `max_model_len` and Anthropic's fields."""
    card, context = ports.model, ports.max_context or None  # not known yet
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "lucevisor",
        "max_model_len": context,
        "type": "model",
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(card.created_s, UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": context,
        "max_tokens": context,
        "capabilities": {name: {"supported": here} for name, here in abilities(ports).items()},
    }


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
