"""JSON schemas made ready for a grammar: objects have the properties that they name, and no others.

By the letter of JSON schema an object may have any further property unless ``additionalProperties`` says no.  Models
then write some, and small ones do not stop; vLLM and llama.cpp allow none by default either.  Pure; knows no grammars.
Invariant: whatever fits the result fits the schema, and something fits the result if something fitted the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_VALUES: Final = frozenset(["enum", "const", "default", "examples"])  # no schemas, whatever they look like
_NAMED: Final = frozenset(["properties", "patternProperties", "$defs", "definitions"])  # schemas by name
# With these a schema may describe a part of an object, to which others add.
_COMPOSING: Final = frozenset(
    ["allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "$anchor", "$recursiveRef"]
)
_CHOICES: Final = frozenset(["$ref", "anyOf", "oneOf"])
_BESIDE_CHOICES: Final = frozenset(
    [
        *("type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable"),
        *("$defs", "definitions", "$schema", "$id", "$comment", "discriminator"),
    ]
)
# Further properties are told of, or needed.
_OPEN: Final = frozenset(["additionalProperties", "patternProperties", "propertyNames", "minProperties"])


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema whose objects allow no properties but those they name.

    The schema itself where objects are put together from several: closing a part of one could forbid everything.
    """
    if not all(_is_whole(one) for one in _schemas(schema)):
        return schema
    result = _closed(schema)
    assert isinstance(result, Mapping)
    return result


def _is_whole(schema: Mapping[str, Any]) -> bool:
    """Whether a schema alone says what its values are."""
    chosen = _CHOICES & schema.keys()
    alone = not chosen or (len(chosen) == 1 and schema.keys() - chosen <= _BESIDE_CHOICES)
    return alone and not _COMPOSING & schema.keys()


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas within it."""
    if isinstance(schema, list):
        for one in schema:
            yield from _schemas(one)
    elif isinstance(schema, Mapping):
        yield schema
        for key, value in schema.items():
            if key in _NAMED and isinstance(value, Mapping):
                yield from _schemas(list(value.values()))
            elif key not in _VALUES:
                yield from _schemas(value)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            result[key] = {name: _closed(one) for name, one in value.items()}
        else:
            result[key] = value if key in _VALUES else _closed(value)
    properties, required = schema.get("properties"), schema.get("required", [])
    if isinstance(properties, Mapping) and isinstance(required, list) and not _OPEN & schema.keys():
        named = all(isinstance(name, str) and name in properties for name in required)
        result |= {"additionalProperties": False} if named else {}
    return result
