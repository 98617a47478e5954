"""What every tool-call format gives and takes: a call, the tools' schemas, and values read from text by schema.

Knows no format. Invariant: a value that cannot be read as its schema says stays text; nothing a model wrote is dropped,
and the arguments of a call are JSON by RFC 8259 with each number as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from lucevisor.text import json_text
from lucevisor.text.json_text import Number

Tools = Sequence[Mapping[str, object]]
"""Tools as OpenAI clients send them: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

_PYTHON_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
# How templates that print values with Python's str() teach models to write JSON's words.
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class ToolCall:
    """One call: the function's name and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class ToolFormat(Protocol):
    """How one model family writes a call between its two tags."""

    @property
    def open(self) -> str:
        """The tag before a call."""

    @property
    def close(self) -> str:
        """The tag after a call."""

    @property
    def bare(self) -> tuple[str, str]:
        """The first tag inside a call and its closing one, for models that forget the opening tag; ("", ""): none."""

    @property
    def tags(self) -> Sequence[str]:
        """All tags of the format that may be control tokens of a vocabulary."""

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call that the text between the tags is, or None when it is not one."""

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call that a body means which `parse` refuses, where it can mean nothing else, or None."""

    def is_inside_value(self, body: str) -> bool:
        """Say whether `body`, cut before a closing tag, ends inside a value, so that the tag is part of that value."""


def make_call(name: str, arguments: Mapping[str, object]) -> ToolCall:
    """Return a call with its arguments written as JSON."""
    return ToolCall(name, json_text.write(arguments))


def has_tool(tools: Tools, name: str) -> bool:
    """Say whether a function of this name was offered."""
    return any(_function(tool).get("name") == name for tool in tools)


def parameter_schema(tools: Tools, name: str, parameter: str) -> Mapping[str, object] | None:
    """Return the JSON schema of one parameter of a function, or None when it is not declared."""
    for tool in tools:
        function = _function(tool)
        if function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            schema = properties.get(parameter) if isinstance(properties, Mapping) else None
            return schema if isinstance(schema, Mapping) else None
    return None


def read_value(text: str, schema: Mapping[str, object] | None) -> object:
    """Return a value written without quotes, as its schema says: JSON where the schema allows it, else the text itself.

    Undeclared parameters are read as JSON if they are JSON.
    """
    kinds = schema_types(schema) if schema is not None else set()
    if kinds and kinds <= {"string"}:
        return text
    try:
        value = json_text.parse(_PYTHON_WORDS.get(text.strip(), text))
    except ValueError:
        return text
    if not kinds:
        return value
    if isinstance(value, Number):
        return _as_number(value, kinds) or text
    allowed = tuple(kind for name in kinds for kind in _PYTHON_TYPES.get(name, ()))
    return value if isinstance(value, allowed) else text


def _as_number(value: Number, kinds: set[str]) -> Number | None:
    """Return the number as a schema of these types wants it, or None when it wants none such."""
    if "number" in kinds:
        return value
    return value.as_integer() if "integer" in kinds else None


def _function(tool: Mapping[str, object]) -> Mapping[str, object]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def schema_types(schema: Mapping[str, object]) -> set[str]:
    """Return the type names that a schema allows, as far as it says."""
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set()
    kinds.update(kind for kind in named if isinstance(kind, str)) if isinstance(named, list) else None
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            kinds |= schema_types(option) if isinstance(option, Mapping) else set()
    choices = schema.get("enum")
    if not kinds and isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        kinds = {"string"}
    return kinds
