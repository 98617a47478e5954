"""What all objects of a response have in common, whichever the endpoint.

Pure.  Invariant: fields and order are OpenAI's; `timings` is the addition.
"""

from __future__ import annotations

from dataclasses import dataclass

from lucevisor.api.output.usage import UsageTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """`response_id`, `created_s` (Unix time) and `fingerprint` are in every object."""

    response_id: str
    created_s: int
    model: str
    fingerprint: str
    include_usage: bool

    def head(self, kind: str) -> dict[str, object]:
        """Return the first fields of an object of `kind`."""
        head: dict[str, object] = {
            "id": self.response_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }
        if self.fingerprint:
            head["system_fingerprint"] = self.fingerprint
        return head

    def chunk(self, kind: str, choices: list[object]) -> dict[str, object]:
        """Return a chunk of a stream."""
        chunk = {**self.head(kind), "choices": choices}
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self, kind: str, totals: UsageTotals) -> list[object]:
        """Return the last chunk, with the usage and no choice, if it was requested."""
        if not self.include_usage:
            return []
        return [{**self.chunk(kind, []), "usage": totals.usage(), "timings": totals.timings_json()}]
