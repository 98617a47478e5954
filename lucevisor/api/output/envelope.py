"""What all objects of a response have in common, whichever the endpoint.

Pure.  Invariant: fields and order are OpenAI's; `timings` is the addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lucevisor.api.output.usage import UsageTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """`response_id`, `created_s` (Unix time) and `fingerprint` are in every object.  `prompt_tokens`: of each choice,
    if usage is to come with every chunk, else empty."""

    response_id: str
    created_s: int
    model: str
    fingerprint: str
    include_usage: bool
    prompt_tokens: Sequence[int] = ()

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

    def chunk(self, kind: str, index: int, choice: object, n_generated: int) -> dict[str, object]:
        """Return a chunk of a stream; `n_generated`: tokens of the choice so far."""
        chunk = {**self.head(kind), "choices": [choice]}
        if self.prompt_tokens:
            n_prompt = self.prompt_tokens[index]
            chunk["usage"] = {
                "prompt_tokens": n_prompt,
                "completion_tokens": n_generated,
                "total_tokens": n_prompt + n_generated,
            }
        elif self.include_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self, kind: str, totals: UsageTotals) -> list[object]:
        """Return the last chunk, with the usage and no choice, if it was requested."""
        if not self.include_usage:
            return []
        return [{**self.head(kind), "choices": [], "usage": totals.usage(), "timings": totals.timings_json()}]
