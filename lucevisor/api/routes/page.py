"""The status page, the status JSON behind it, and its restart button.

The page is one document without a build step: `page/` holds its markup, style and scripts, which are put inline here.
Knows no field of the status.  Invariant: the content security policy lets nothing run but these scripts, and lets no
string become markup (trusted types), so text of models and names of groups cannot.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from lucevisor.api.context import PORTS
from lucevisor.api.errors import ApiError
from lucevisor.errors import LucevisorError

_FILES: Final = Path(__file__).parents[1] / "page"
_SCRIPTS: Final = ("draw.js", "box.js", "markdown.js", "chat.js")


class RestartBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/restart."""

    group: str
    now: bool = False


async def page(_: web.Request) -> web.Response:
    """GET /."""
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
    """Return the page and its content security policy."""
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


async def status(request: web.Request) -> web.Response:
    """GET /status: the JSON of `lucevisor status --json`; `admin` says whether restarts are possible here."""
    ports = request.app[PORTS]
    body = {**ports.status(), "admin": ports.admin_keys.required}
    return web.Response(
        body=msgspec.json.encode(body), content_type="application/json", headers={"Cache-Control": "no-store"}
    )


async def restart(request: web.Request) -> web.Response:
    """POST /admin/restart: begin the restart of a group; GET /status shows its progress."""
    try:
        order = msgspec.json.decode(await request.read(), type=RestartBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is invalid: {str(error)[:300]}") from None
    try:
        request.app[PORTS].restart(order.group, order.now)
    except LucevisorError as error:
        raise ApiError(409, str(error), code="not_restarted") from None
    return web.Response(
        body=msgspec.json.encode({"restarting": order.group}), status=202, content_type="application/json"
    )
