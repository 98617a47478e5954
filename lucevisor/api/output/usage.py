"""Token counts and timings of a response, and their JSON.

Pure.  Invariant: the counts cover the choices that the client received; a prompt shared by several counts once.
"""

from __future__ import annotations

from dataclasses import dataclass

from lucevisor.api.output.processor import ChoiceUsage
from lucevisor.engine.request import Timings


@dataclass(slots=True)
class UsageTotals:
    """Sums over the choices of a request.  `timings` are those of the choice that ended last."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0
    timings: Timings | None = None

    def add(self, usage: ChoiceUsage, timings: Timings, *, new_prompt: bool) -> None:
        """Add a choice; `new_prompt`: no earlier choice had the same prompt."""
        if new_prompt:
            self.prompt += usage.prompt
            self.cached += usage.cached
        self.generated += usage.generated
        self.reasoning += usage.reasoning
        self.accepted += usage.accepted
        self.rejected += usage.rejected
        self.timings = timings

    def usage(self) -> dict[str, object]:
        """Return OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning,
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.rejected,
            },
        }

    def timings_json(self) -> dict[str, float]:
        """Return `timings`, an extension: seconds in the queue, of prefill and of decoding."""
        if self.timings is None:
            return {}
        t = self.timings
        return {"queue_s": round(t.queue_s, 6), "prefill_s": round(t.prefill_s, 6), "decode_s": round(t.decode_s, 6)}
