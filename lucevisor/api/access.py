"""Access control: peer address, Host header, API key, CORS, type and encoding of bodies.

Without keys only this machine is served, unless `allow_open` is set.
"""

from __future__ import annotations

import functools
import ipaddress
from typing import Final

from aiohttp import web

from lucevisor.api.contexts import ApiSettings
from lucevisor.api.errors import ApiError
from lucevisor.api.keys import ApiKeys, Caller
from lucevisor.errors import show

OPEN_PATHS: Final = frozenset({"/health", "/v1/health", "/ready", "/"})
"""Paths that need no key: load balancers have none, and the status page shows nothing until it is given one."""
ADMIN_PATHS: Final = "/admin/"
"""Prefix of the paths that need an admin key."""
OLLAMA_PATHS: Final = "/api/"
"""Paths of Ollama's API; its errors have another shape, and its users send JSON under curl's own Content-Type."""


_EXPOSED: Final = "x-request-id, request-id, retry-after"
"""Headers of a response that a page may read."""


def check_access(request: web.Request, settings: ApiSettings, keys: ApiKeys, admin_keys: ApiKeys) -> Caller:
    """Return the sender of a request; raises ApiError 401 or 403.  An admin key is an API key too."""
    if not keys.required and not settings.allow_open:
        _check_local(request, settings.host)
    if request.path.startswith(ADMIN_PATHS):
        if not admin_keys.required:
            raise ApiError(403, "no admin key is configured; set server.admin_keys_file", code="no_admin_keys")
        return _check_key(request, admin_keys, "admin")
    # Without required keys, a client could send many different ones and take many shares.
    if not keys.required or request.path in OPEN_PATHS:
        return Caller.of_address(request.remote or "")
    return _check_key(request, keys, "API", also=admin_keys)


def _check_key(request: web.Request, keys: ApiKeys, kind: str, also: ApiKeys | None = None) -> Caller:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token = (token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")).strip()
    if not token:
        raise _unauthorised(f"no {kind} key was sent; send it as Authorization: Bearer KEY")
    caller = keys.caller(token) or (also.caller(token) if also is not None else None)
    if caller is None:
        raise _unauthorised(f"the {kind} key is not known to this server")
    return caller


def _unauthorised(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _check_local(request: web.Request, host: str) -> None:
    peer = request.remote or ""
    if not _is_loopback(peer):
        raise ApiError(
            403,
            f"without API keys this server serves its own machine only, not {show(peer)}; "
            "set server.api_keys_file, or server.allow_open to serve everyone",
            code="loopback_only",
        )
    # DNS rebinding: a web page can point its own name at 127.0.0.1 and send requests through a visitor's browser.
    named = _host_name(request.headers.get("Host", ""))
    if (
        named
        and named != host.lower()
        and not named.endswith(".localhost")
        and named != "localhost"
        and not _is_loopback(named)
    ):
        raise ApiError(
            403,
            f"Host is {show(named)}; without API keys only localhost, a loopback address or server.host is "
            "answered; set server.api_keys_file or server.allow_open",
            code="foreign_host",
        )


@functools.lru_cache(1024)
def _is_loopback(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def _host_name(header: str) -> str:
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() and ":" in header else header


def check_content_type(request: web.Request) -> None:
    """Raise ApiError 400 for a body that is not announced as JSON, as a page of any origin may send forms."""
    kind = request.content_type.lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    if request.path.startswith(OLLAMA_PATHS) and "Origin" not in request.headers:
        return
    sent = request.headers.get("Content-Type", "")
    raise ApiError(
        400, f"Content-Type is {show(sent)}; send the body as application/json", code="unsupported_content_type"
    )


def check_content_encoding(request: web.Request) -> None:
    """Raise ApiError 415 for a compressed body, as a few bytes may expand to any size."""
    sent = request.headers.get("Content-Encoding", "identity")
    if sent.strip().lower() != "identity":
        raise ApiError(
            415,
            f"Content-Encoding is {show(sent)}; send the body uncompressed, without this header",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "identity"},
        )


def cors_headers(origin: str | None, settings: ApiSettings) -> dict[str, str]:
    if not settings.cors_origins or origin is None:
        return {}
    if "*" in settings.cors_origins:
        return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}
    if origin not in settings.cors_origins:
        return {"Vary": "Origin"}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": _EXPOSED,
        "Vary": "Origin",
    }


def is_preflight(request: web.Request) -> bool:
    return (
        request.method == "OPTIONS"
        and "Origin" in request.headers
        and "Access-Control-Request-Method" in request.headers
    )


def preflight(request: web.Request, settings: ApiSettings) -> web.Response | None:
    """Return the response to a preflight from a configured origin, else None."""
    if "Access-Control-Allow-Origin" not in cors_headers(request.headers.get("Origin"), settings):
        return None
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "content-type"),
        "Access-Control-Max-Age": "600",
    }
    return web.Response(status=204, headers=headers)
