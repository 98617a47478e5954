"""Schemas of request bodies, and their decoder: any bytes give a record or an ApiError that names the parameter."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, inspect

from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.errors import show
from lucevisor.text.tokenizer import SURROGATES

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 4096
MAX_CHOICES = 128
"""Choices of one request over all its prompts; each is a sequence of its own."""
MAX_ECHO_CHARS = 4 * 1024 * 1024
"""Characters of echoed prompts in one response, over all its choices."""
MAX_PROMPT_LOGPROBS = 256 * 1024
"""Log-probabilities of echoed prompts in one response, over all its choices."""
MAX_TEXT_CHARS = 4 * 1024 * 1024
MAX_TEXT_TOKENS = 1024 * 1024
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Largest response of /tokenize and /detokenize, which the context does not limit."""
MAX_TOOL_VALUES = 32 * 1024
"""JSON values in all tools of a request, enough for the schemas of a thousand tools."""

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Limit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1: none
Flag = bool | None
Fraction = Annotated[float, Meta(ge=0, le=1)]
OpenAiPenalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)] | bool
BreakerText = Annotated[str, Meta(min_length=1, max_length=40)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]

ALIASES: Final[dict[str, str]] = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "thinking_budget_tokens": "max_thinking_tokens",
    "thinking_token_budget": "max_thinking_tokens",
}
"""llama.cpp's and vLLM's names of parameters."""

EFFORT_BUDGETS: Final[dict[str, int]] = {"none": 0, "minimal": 256, "low": 1024, "medium": 8192, "high": 32768}
"""Tokens of thinking by effort, for chat templates without a `reasoning_effort` variable.

A higher effort has no limit.
"""

_NOT_MISSPELT: Final = frozenset({"reasoning_format"})
"""Parameters of other servers whose names resemble declared ones and are no misspellings."""

NOT_HERE: Final = "is not supported by this server; leave it out"

REFUSED: Final[dict[str, str]] = {
    "audio": "is not supported: this server answers with text only; leave it out",
    "allowed_token_ids": NOT_HERE,
    "bad_words": "is not supported; use logit_bias",
    "functions": "is deprecated and not supported; use tools",
    "messages": "is a parameter of /v1/chat/completions; send prompt, or use that path",
    "moderation": NOT_HERE,
    "prompt": "is a parameter of /v1/completions; send messages, or use that path",
    "suffix": "is a parameter of /v1/completions; use that path, or leave it out",
    "web_search_options": "is not supported: this server does not search the web; leave it out",
}
"""Known parameters that would change the answer and are not supported (null is accepted), or are another endpoint's."""

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "modalities": (["text"],),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "dynatemp_range": (0,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
}
"""Parameters accepted only with their neutral value."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: Flag = None
    continuous_usage_stats: Flag = None  # vLLM's: with every chunk
    include_obfuscation: Flag = None  # padding against traffic analysis: never sent


class JsonSchemaFormat(msgspec.Struct):
    """The schema of a response format.  `strict`: refuse keywords that cannot be enforced."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: Flag = None


class ResponseFormat(msgspec.Struct):
    """The requested response format; `schema` is llama.cpp's place for one."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of its forms."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Flag = None
    disable_any_whitespace: Flag = None
    disable_fallback: Flag = None
    whitespace_pattern: str | None = None


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters common to chat and plain completions.  None: absent, the default applies."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: off
    min_p: Fraction | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: dict[str, Bias] | list[tuple[int | str, Bias]] | None = None  # the list: llama.cpp's
    presence_penalty: OpenAiPenalty | None = None
    frequency_penalty: OpenAiPenalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    typical_p: Fraction | None = None  # from here on as in llama.cpp
    top_n_sigma: Annotated[float, Meta(ge=-1, le=1000)] | None = None
    xtc_probability: Fraction | None = None
    xtc_threshold: Fraction | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    dry_sequence_breakers: Annotated[list[BreakerText], Meta(max_length=16)] | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Meta(ge=0, le=100)] | None = None
    mirostat_eta: Fraction | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_tokens: Limit | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: Flag = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: Flag = None
    stream: Flag = None
    stream_options: StreamOptions | None = None
    return_token_ids: Flag = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | None = None  # llama.cpp's
    grammar: str | None = None  # llama.cpp's
    regex: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, given as one string or a list."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class NamedFunction(msgspec.Struct):
    """The function named by a tool_choice object."""

    name: str


class AllowedTools(msgspec.Struct):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ToolChoice(msgspec.Struct):
    """A tool_choice that names tools."""

    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


Body = TypeVar("Body", bound=msgspec.Struct)
_MAX_NAME_CHARS: Final = 80  # of an unknown parameter, in the answer
_EMPTY: Final[tuple[object, ...]] = (None, False, "", [], {})
_PATH: Final = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[([^\]]*)\]")  # of such a path: a field or an index
_TYPE_NAMES: Final = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
    "null": "null",
    "array": "array",
    "object": "object",
}


_type_info = functools.cache(inspect.type_info)


def decode_object(raw: bytes) -> dict[str, Any]:
    """Return the body's JSON object; raises ApiError 400."""
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        _refuse_broken_text(raw)
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {_json_type(value)}; send an object", code="invalid_json")
    return value


def _refuse_broken_text(raw: bytes) -> None:
    """Raise ApiError 400 naming a value that is no UTF-8, as msgspec's message is about the syntax or a byte."""
    try:  # Python accepts both: bytes become surrogates
        path = _broken_text(json.loads(raw.decode("utf-8", "surrogateescape")), "")
    except (ValueError, RecursionError):
        return
    if path is not None:
        why = "holds bytes that are not UTF-8, or half of a surrogate pair; send UTF-8, and both halves or U+FFFD"
        raise bad_parameter(_shortened(path.lstrip(".") or "body"), why)


def _broken_text(value: object, path: str) -> str | None:
    """Return the path of the first text with a surrogate; of a key, the path of its object."""
    if isinstance(value, str):
        return path if SURROGATES.search(value) else None
    inside: Iterable[tuple[str, object]] = ()
    if isinstance(value, list):
        inside = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        if SURROGATES.search("".join(value)):
            return path
        inside = ((f"{path}.{name}", item) for name, item in value.items())
    return next((place for name, item in inside if (place := _broken_text(item, name)) is not None), None)


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME_CHARS else name[:_MAX_NAME_CHARS] + "…"


@dataclass(frozen=True, kw_only=True)
class ParameterRules:
    """Rules of an API for parameters that its bodies do not declare: `refused` with the reason; `neutral`: accepted
    with these values only; `aliases`: other names of declared ones. All others are accepted without effect, unless they
    look like a misspelt one."""

    refused: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


OPENAI: Final = ParameterRules(refused=REFUSED, neutral=NEUTRAL, aliases=ALIASES)


def to_record(kind: type[Body], fields: dict[str, Any], rules: ParameterRules = OPENAI) -> Body:
    """Convert a decoded object into `kind`; raises ApiError 400 naming the invalid parameter."""
    known = kind.__struct_fields__
    kept: dict[str, Any] = {}
    written: dict[str, str] = {}  # parameter -> its other name, as the client wrote it
    for name, value in fields.items():
        standard = rules.aliases.get(name, name)
        if standard in known:
            if kept.setdefault(standard, value) != value:
                raise bad_parameter(name, f"{show(value)} contradicts the same parameter by another name; send one")
            if standard != name:
                written[standard] = name
        elif name in rules.refused and value not in _EMPTY:
            raise bad_parameter(name, rules.refused[name], "unsupported_parameter")
        elif name in rules.neutral and value is not None and value not in rules.neutral[name]:
            neutral = " or ".join(show(v) for v in rules.neutral[name])
            raise bad_parameter(
                name, f"{show(value)} is not supported; leave it out or send {neutral}", "unsupported_value"
            )
        elif not (name in rules.refused or name in rules.neutral or value is None or _is_new(name, known)):
            shown = _shortened(name)
            raise bad_parameter(
                shown, f"is not a parameter of this endpoint{_nearest(shown, known)}", "unknown_parameter"
            )
    try:
        return convert(kind, kept)
    except ApiError as error:
        if error.param not in written:
            raise
        raise bad_parameter(written[error.param], error.message.partition(": ")[2]) from None


def ignored(
    kind: type[Body], fields: dict[str, Any], rules: ParameterRules = OPENAI, more: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return the names of parameters without effect, and `more` of them, in order: as many as a header holds."""
    effective = {*kind.__struct_fields__, *rules.refused, *rules.neutral, *rules.aliases}
    unused = {name for name in fields if fields[name] is not None and name not in effective}
    return tuple(sorted(map(_header_text, unused | {*more}))[:32])


def _is_new(name: str, known: tuple[str, ...]) -> bool:
    return name in _NOT_MISSPELT or not difflib.get_close_matches(name[:_MAX_NAME_CHARS], known, n=1, cutoff=0.8)


def _header_text(name: str) -> str:
    shown = name if len(name) <= _MAX_NAME_CHARS else name[:_MAX_NAME_CHARS] + "..."
    return shown.encode("ascii", "backslashreplace").decode() if shown.isprintable() else ascii(shown)


def convert(kind: type[Body], value: object, where: str = "", *, strict: bool = True) -> Body:
    """Convert plain values into `kind`; raises ApiError 400 whose parameter is `where` plus the path inside. Without
    `strict`, texts are read as numbers and booleans."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        if not isinstance(error, msgspec.ValidationError):
            raise bad_parameter(where or "body", "is nested too deep or holds a number out of range") from None
        raise _translate(str(error), kind, value, where) from None


def _translate(message: str, kind: Any, value: object, where: str) -> ApiError:
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
            name, f"is unknown here{_nearest(unknown['name'], _fields_at(kind, path))}", "unknown_parameter"
        )
    sent = _value_at(value, path)
    if message.startswith("Invalid enum value") and (choices := _choices_at(kind, path)):
        return bad_parameter(param, f"{show(sent)} is not one of its values; use {', '.join(map(str, choices))}")
    text = re.sub(r"`([^`]*)`", lambda m: " or ".join(_TYPE_NAMES.get(t, t) for t in m[1].split(" | ")), message)
    shown = f"{show(sent)}: " if isinstance(sent, str | int | float | bool) else ""
    return bad_parameter(param or "body", f"{shown}{text[:1].lower()}{text[1:]}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else "; leave it out"


def _fields_at(kind: Any, path: str) -> tuple[str, ...]:
    """Return the field names of the record at `path`, if it is directly inside `kind`, else none."""
    if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
        return ()
    for inner in msgspec.structs.fields(kind):
        if path == f".{inner.name}":
            options = getattr(inner.type, "__args__", (inner.type,))
            return next((t.__struct_fields__ for t in options if hasattr(t, "__struct_fields__")), ())
    return kind.__struct_fields__ if not path else ()


def _choices_at(kind: Any, path: str) -> list[Any]:
    types: list[Any] = [_type_info(kind)]
    for name, _ in _STEP.findall(path):
        inside: list[Any] = []
        for item in _members(types):
            if name and isinstance(item, inspect.StructType):
                inside += [inner.type for inner in item.fields if inner.encode_name == name]
            else:  # of an array or a dict
                inside += [getattr(item, part) for part in ("item_type", "value_type") if hasattr(item, part)]
        types = inside
    return [value for item in _members(types) if isinstance(item, inspect.LiteralType) for value in item.values]


def _members(types: list[Any]) -> list[Any]:
    return [part for item in types for part in (item.types if isinstance(item, inspect.UnionType) else (item,))]


def _value_at(value: object, path: str) -> object:
    """Return the value at a path such as `.stop[1]`, or None if the path is not a single value."""
    for name, index in _STEP.findall(path):
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
