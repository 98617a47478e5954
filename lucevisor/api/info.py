"""Models, properties, health, metrics, the status page, one document made of the parts in `page/`, and its restart
button."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from lucevisor import __version__
from lucevisor.api.app_state import BUFFERED_BODIES, METRICS, MODELS, SERVER
from lucevisor.api.bodies import json_response, read_body
from lucevisor.api.contexts import ModelContext, ModelControl
from lucevisor.api.errors import ApiError, unavailable
from lucevisor.api.parameters import check_model, yes_no_tokens
from lucevisor.errors import LucevisorError
from lucevisor.text.output_parser import OutputFormat


async def models(request: web.Request) -> web.Response:
    """List the served models, in the shapes of OpenAI's and Anthropic's lists at once."""
    cards = [_model(ctx) for ctx in request.app[MODELS].listed()]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return json_response({"object": "list", "data": cards, "has_more": False, **ends})


async def model(request: web.Request) -> web.Response:
    """Describe one model."""
    name = request.match_info["id"]
    ctx = request.app[MODELS].find(name)
    check_model(name, ctx)
    return json_response(_model(ctx))


async def props(request: web.Request) -> web.Response:
    """Return a model's properties, of several that of ?model=: the fields of llama.cpp's server that exist here."""
    ctx = request.app[MODELS].find(request.query.get("model"))
    tokenizer, defaults = ctx.tokenizer, ctx.defaults
    eos = [tokenizer.decode([i], skip_special=False) for i in sorted(tokenizer.eos_ids)]
    settings: dict[str, object] = {"n_ctx": ctx.max_context, "params": msgspec.to_builtins(defaults)}
    if ctx.direct_defaults is not None:
        settings["params_without_thinking"] = msgspec.to_builtins(ctx.direct_defaults)
    return json_response(
        {
            "default_generation_settings": settings,
            "total_slots": ctx.max_sequences,
            "model_alias": ctx.model.name,
            "model_path": ctx.model.path,
            "architecture": ctx.model.architecture,
            "quant": ctx.model.quant,
            "n_vocab": tokenizer.n_vocab,
            "chat_template": ctx.template.source if ctx.template is not None else None,
            "bos_token": None if tokenizer.bos is None else tokenizer.decode([tokenizer.bos], skip_special=False),
            "eos_tokens": eos,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"lucevisor {__version__}",
        }
    )


async def lora_adapters(request: web.Request) -> web.Response:
    """List a model's LoRA adapters, of several that of ?model=, as llama.cpp's server does."""
    ctx = request.app[MODELS].find(request.query.get("model"))
    adapters = enumerate(ctx.model.adapters)
    return json_response([{"id": i, "name": a.name, "path": a.path, "scale": a.scale} for i, a in adapters])


async def slots(request: web.Request) -> web.Response:
    """List the slots for sequences, of several models those of ?model=, as llama.cpp's server does: the busy ones
    first."""
    ctx = request.app[MODELS].find(request.query.get("model"))
    busy = 0
    for engine in ctx.engine.replicas.values() if ctx.engine is not None else ():
        now = engine.statistics()
        busy += now.running + now.queued
    if "fail_on_no_slot" in request.query and busy >= ctx.max_sequences:
        raise unavailable("no slot is available; try again later", ctx.retry_after_s(), "no_slot")
    return json_response(
        [{"id": i, "n_ctx": ctx.max_context, "is_processing": i < busy} for i in range(ctx.max_sequences)]
    )


async def health(_: web.Request) -> web.Response:
    """Return 200 while the server is alive."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Return whether the pipeline is ready, and what is not."""
    parts = request.app[SERVER].not_ready()
    if not parts:
        return json_response({"status": "ready"})
    waiting = [{"name": part.name, "state": part.state, "reason": part.reason} for part in parts]
    return json_response({"status": "not ready", "not_ready": waiting}, 503)


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics for Prometheus."""
    body, content_type = request.app[METRICS].render(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


def abilities(ctx: ModelContext) -> dict[str, bool]:
    template = ctx.template
    output = OutputFormat() if template is None else template.output_format
    return {
        "completions": ctx.pooling.generates,
        "embeddings": not ctx.pooling.ranks,
        "image_input": ctx.images is not None,
        "rerank": ctx.pooling.ranks or bool(yes_no_tokens(ctx)),
        "structured_outputs": ctx.pooling.generates,
        "thinking": output.reasoning is not None,
        "tools": template is not None and output.tools is not None and "tools" in template.source,
    }


def _model(ctx: ModelContext) -> dict[str, object]:
    card, context = ctx.model, ctx.max_context or None  # not known yet
    engines = ctx.engine.replicas if ctx.engine else {}
    replicas = {name: {"ready": engine.ready} for name, engine in engines.items() if name}
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
        "capabilities": {name: {"supported": here} for name, here in abilities(ctx).items()},
        "status": _status(ctx),
        **({"aliases": [*card.aliases]} if card.aliases else {}),
        **({"parent": card.parent, "root": card.path} if card.parent else {}),
        **({"replicas": replicas} if replicas else {}),
    }


_ROUTER_STATES: Final = {"parked": "sleeping", "leaving": "loaded"}
"""The states of llama.cpp's server, for those of ours that have other names."""


def _status(ctx: ModelContext) -> dict[str, object]:
    """Return whether a model is loaded, as llama.cpp's server shows it in router mode."""
    failed = {"failed": True, "reason": ctx.control.problem} if ctx.control is not None and ctx.control.problem else {}
    return {"value": _ROUTER_STATES.get(ctx.model_state, ctx.model_state), **failed}


_Order = TypeVar("_Order", bound=msgspec.Struct)
_FILES: Final = Path(__file__).with_name("page")
_SCRIPTS: Final = ("draw.js", "box.js", "markdown.js", "chat.js")


class RestartBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/restart."""

    group: str
    now: bool = False


async def page(_: web.Request) -> web.Response:
    """Return the status page."""
    body, policy = document()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)


@functools.cache
def document() -> tuple[bytes, str]:
    style = (_FILES / "page.css").read_text("utf-8")
    script = "".join((_FILES / name).read_text("utf-8") for name in _SCRIPTS)
    text = (_FILES / "page.html").read_text("utf-8")
    text = text.replace("<style></style>", f"<style>{style}</style>").replace(
        "<script></script>", f"<script>{script}</script>"
    )
    rules = (
        "default-src 'none'",
        f"script-src {_source(script)}",
        f"style-src {_source(style)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return text.encode(), "; ".join(rules)


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class ModelBody(msgspec.Struct):
    """POST /models/load and /models/unload."""

    model: str


async def load_model(request: web.Request) -> web.Response:
    """Load a model, as llama.cpp's server does in router mode; answers when it is loaded."""
    return await _order(request, lambda control: control.load(), "model_not_loaded")


async def unload_model(request: web.Request) -> web.Response:
    """Unload a model when it has no requests, as llama.cpp's server does in router mode."""
    return await _order(request, lambda control: control.unload(), "model_not_unloaded")


async def _read_order(request: web.Request, kind: type[_Order]) -> _Order:
    body: list[bytes] = []
    try:
        await read_body(request, body)
        return msgspec.json.decode(b"".join(body), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is invalid: {str(error)[:300]}") from None
    finally:
        request.app[BUFFERED_BODIES].n_bytes -= sum(map(len, body))


async def _order(request: web.Request, order: Callable[[ModelControl], Awaitable[None]], code: str) -> web.Response:
    name = (await _read_order(request, ModelBody)).model
    ctx = request.app[MODELS].find(name)
    check_model(name, ctx)
    if ctx.control is None:
        raise ApiError(409, "replicas are loaded as long as their groups run", code="always_loaded")
    try:
        await order(ctx.control)
    except LucevisorError as error:
        raise ApiError(409, str(error), code=code) from None
    return json_response({"success": True})


async def status(request: web.Request) -> web.Response:
    """Return the status, as `lucevisor status --json` prints it; `admin`: whether restarts are possible here."""
    server = request.app[SERVER]
    body = {**server.status(), "admin": server.admin_keys.required}
    response = json_response(body)
    response.headers["Cache-Control"] = "no-store"
    return response


async def restart(request: web.Request) -> web.Response:
    """Begin the restart of a group's daemon; needs an admin key.  GET /status shows its progress."""
    command = await _read_order(request, RestartBody)
    try:
        request.app[SERVER].restart(command.group, command.now)
    except LucevisorError as error:
        raise ApiError(409, str(error), code="not_restarted") from None
    return json_response({"restarting": command.group}, 202)
