"""One JSON schema as a document: what its references lead to, by pointer, ``$id`` and anchor.

Pure; fetches nothing.  Invariant: a place keeps the base URI that references within it are relative to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

VALUES: Final = frozenset(["enum", "const", "default", "examples"])
"""Keywords whose values are no schemas, whatever they look like."""

_NAMED: Final = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
_OLD_DRAFTS: Final = ("draft-03", "draft-04", "draft-06", "draft-07")


@dataclass(frozen=True, slots=True)
class Place:
    """A schema within a document.  ``path``: a pointer to it, for messages."""

    schema: Any
    base: str
    path: str


class Document:
    """A root schema, and what may be referred to in it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        dialect = root.get("$schema")
        self.ref_stands_alone = isinstance(dialect, str) and any(draft in dialect for draft in _OLD_DRAFTS)
        """Whether the dialect ignores keywords beside ``$ref``."""
        self._id_key = "id" if isinstance(dialect, str) and "draft-04" in dialect else "$id"
        self.root = Place(root, self._base(root, ""), "#")
        self._resources: dict[str, Place] = {}
        self._anchors: dict[tuple[str, str], Place] = {}
        self._n_dynamic: dict[str, int] = {}
        self._index()

    @property
    def n_resources(self) -> int:
        """Resources: the root and every schema with an ``$id`` of its own."""
        return len({id(place.schema) for place in self._resources.values()})

    def child(self, place: Place, *steps: str | int) -> Place:
        """Return what lies under these keys; raises LookupError."""
        value, base, path = place.schema, place.base, place.path
        for step in steps:
            value = value[step]
            base = self._base(value, base) if isinstance(value, Mapping) else base
            path += "/" + str(step).replace("~", "~0").replace("/", "~1")
        return Place(value, base, path)

    def resolve(self, reference: str, base: str) -> Place:
        """Return what a reference leads to; raises LookupError."""
        uri, fragment = urldefrag(base + reference if reference.startswith("#") else urljoin(base, reference))
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors[uri, fragment]
        place = self._resources[uri]
        for step in fragment.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(place.schema, (Mapping, list)):
                raise LookupError(reference)
            place = self.child(place, int(key) if isinstance(place.schema, list) and key.isdigit() else key)
        return place

    def is_static(self, anchor: str) -> bool:
        """Return whether a dynamic anchor stands at one place only."""
        return self._n_dynamic.get(anchor, 0) <= 1

    def _base(self, schema: Mapping[str, Any], base: str) -> str:
        own = schema.get(self._id_key)
        if not isinstance(own, str) or own.startswith("#") or (self.ref_stands_alone and "$ref" in schema):
            return base
        return urldefrag(urljoin(base, own)).url

    def _index(self) -> None:
        self._resources[""] = self._resources[self.root.base] = self.root
        left: list[tuple[Place, bool]] = [(self.root, False)]
        while left:
            place, named = left.pop()
            if isinstance(place.schema, list):
                left += [(self.child(place, i), False) for i in range(len(place.schema))]
            if not isinstance(place.schema, Mapping):
                continue
            if not named:
                self._add(place)
            for key in place.schema:
                if named or key not in VALUES:
                    left.append((self.child(place, key), not named and key in _NAMED))

    def _add(self, place: Place) -> None:
        self._resources.setdefault(place.base, place)
        own = place.schema.get(self._id_key)
        if isinstance(own, str) and own.startswith("#"):
            self._anchors.setdefault((place.base, own[1:]), place)
        for key in ("$anchor", "$dynamicAnchor"):
            anchor = place.schema.get(key)
            if isinstance(anchor, str):
                self._anchors.setdefault((place.base, anchor), place)
                self._n_dynamic[anchor] = self._n_dynamic.get(anchor, 0) + (key == "$dynamicAnchor")
