"""Bytes of a request to a typed record, or an ApiError that names the parameter.

Knows HTTP bodies and msgspec; knows no endpoint.  Invariant: whatever the bytes are, the outcome is a record or an
ApiError with status 4xx.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from aiohttp import web

from lucevisor.api.bodies import HARMLESS, NEUTRAL, REFUSED
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.errors import show

Body = TypeVar("Body", bound=msgspec.Struct)
P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 8 * 1024
"""Bodies up to this size are worked on in the event loop (about 2 ms of tokenizing); longer ones in a thread."""

_PATH: Final = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_TYPE_NAMES: Final = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
    "null": "null",
    "array": "array",
    "object": "object",
}


async def read_object(request: web.Request, limit_bytes: int, timeout_s: float) -> tuple[dict[str, Any], int]:
    """Return the JSON object in a request's body, and its size in bytes; ApiError 400, 408 or 413."""
    media_type = request.content_type.lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        sent = request.headers.get("Content-Type", "")
        raise ApiError(
            400, f"Content-Type is {show(sent)}; send the body as application/json", code="unsupported_content_type"
        )
    if request.content_length is not None and request.content_length > limit_bytes:
        raise too_large(limit_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            raw = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", code="request_timeout") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large(limit_bytes) from None
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body cannot be read: {error}", code="invalid_body") from None
    return await offload(len(raw), _decode_object, raw), len(raw)


async def offload(size_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` here when its input is small, else in a thread, so that a long prompt does not stall other streams."""
    if size_bytes <= INLINE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def too_large(limit_bytes: int) -> ApiError:
    """Return the 413; `limit_bytes` is the most a body may have."""
    return ApiError(413, f"the body is larger than {limit_bytes} bytes; send less", code="request_too_large")


def _decode_object(raw: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {_json_type(value)}; send an object", code="invalid_json")
    return value


def to_record(kind: type[Body], fields: dict[str, Any]) -> Body:
    """Convert a decoded object into `kind`; ApiError 400 naming the parameter that does not fit.

    Parameters of `HARMLESS` are left out, those of `REFUSED` and other values than those of `NEUTRAL` are refused.
    """
    known = kind.__struct_fields__
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in known:
            kept[name] = value
        elif name in REFUSED and value is not None:
            raise bad_parameter(name, REFUSED[name], "unsupported_parameter")
        elif name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            neutral = " or ".join(show(v) for v in NEUTRAL[name])
            raise bad_parameter(
                name, f"{show(value)} is not supported; leave it out or send {neutral}", "unsupported_value"
            )
        elif name not in HARMLESS and name not in REFUSED and name not in NEUTRAL:
            raise bad_parameter(
                name, f"is not a parameter of this endpoint{_nearest(name, known)}", "unknown_parameter"
            )
    return convert(kind, kept)


def convert(kind: type[Body], value: object, where: str = "") -> Body:
    """Convert plain values into `kind`; ApiError 400 whose parameter is `where` followed by the path inside."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        if not isinstance(error, msgspec.ValidationError):
            raise bad_parameter(where or "body", "is nested too deep or holds a number out of range") from None
        raise _translate(str(error), kind, value, where) from None


def _translate(message: str, kind: type[msgspec.Struct], value: object, where: str) -> ApiError:
    path = ""
    if found := _PATH.search(message):
        path, message = found["path"], message[: found.start()]
    param = (where + path).lstrip(".")
    if missing := _MISSING.match(message):
        name = _join(param, missing["name"])
        return bad_parameter(name, "is missing; it is required", "missing_required_parameter")
    if unknown := _UNKNOWN.match(message):
        name = _join(param, unknown["name"])
        return bad_parameter(
            name, f"is not known here{_nearest(unknown['name'], _fields_at(kind, path))}", "unknown_parameter"
        )
    text = re.sub(r"`([^`]*)`", lambda m: " or ".join(_TYPE_NAMES.get(t, t) for t in m[1].split(" | ")), message)
    sent = _value_at(value, path)
    shown = f"{show(sent)}: " if isinstance(sent, str | int | float | bool) else ""
    return bad_parameter(param or "body", f"{shown}{text[:1].lower()}{text[1:]}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else "; leave it out"


def _fields_at(kind: type[msgspec.Struct], path: str) -> tuple[str, ...]:
    """Return the names of the fields of the record at `path`, as far as it is a record directly inside `kind`."""
    for field in msgspec.structs.fields(kind):
        if path == f".{field.name}":
            options = getattr(field.type, "__args__", (field.type,))
            return next((t.__struct_fields__ for t in options if hasattr(t, "__struct_fields__")), ())
    return kind.__struct_fields__ if not path else ()


def _value_at(value: object, path: str) -> object:
    """Return the value at a path such as `.stop[1]`, or None where the path names no single one."""
    for name, index in re.findall(r"\.([^.\[]+)|\[([^\]]*)\]", path):
        if name and isinstance(value, dict):
            value = value.get(name)
        elif index.isdigit() and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            return None
    return value


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")
