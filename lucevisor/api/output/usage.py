"""Token counts and timings of a response, and their JSON.

Pure.  Invariant: the counts cover the choices that the client received; a prompt shared by several counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lucevisor.api.output.processor import ChoiceUsage
from lucevisor.compression.compressor import CompressedPrompt
from lucevisor.engine.request import Timings
from lucevisor.protocol.steps import Sampling

_SAMPLING: Final = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Parameters that may come from the model's defaults."""


@dataclass(slots=True)
class UsageTotals:
    """Sums over the choices of a request.  `timings` are those of the choice that ended last; `compressed`:
    what PFlash made of the prompts; `sampling`: how the choices were drawn."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0
    timings: Timings | None = None
    compressed: Sequence[CompressedPrompt] = ()
    sampling: Sampling = field(default_factory=Sampling)

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
            **self.extension(),
        }

    def extension(self) -> dict[str, object]:
        """Return `lucevisor`, an extension of any API's usage: the sampling, and what PFlash kept, if anything."""
        told: dict[str, object] = {"sampling": {name: getattr(self.sampling, name) for name in _SAMPLING}}
        asked = [prompt for prompt in self.compressed if prompt.outcome != "short"]
        if not asked:
            return {"lucevisor": told}
        pflash: dict[str, object] = {
            "prompt_tokens": sum(prompt.n_before for prompt in self.compressed),
            "kept_tokens": sum(prompt.n_kept for prompt in self.compressed),
        }
        reasons = sorted({prompt.reason for prompt in asked if prompt.reason})
        if reasons:
            pflash["reason"] = "; ".join(reasons)
        return {"lucevisor": told | {"pflash": pflash}}

    def llama_timings(self) -> dict[str, float]:
        """Return llama.cpp's `timings`: tokens that were computed, and milliseconds of prefill and of decoding."""
        t = self.timings
        if t is None:
            return {}
        told: dict[str, float] = {"cache_n": self.cached}
        for name, n, seconds in (
            ("prompt", self.prompt - self.cached, t.prefill_s),
            ("predicted", self.generated, t.decode_s),
        ):
            told |= {
                f"{name}_n": n,
                f"{name}_ms": round(1e3 * seconds, 3),
                f"{name}_per_token_ms": round(1e3 * seconds / n, 6) if n else 0.0,
                f"{name}_per_second": round(n / seconds, 3) if seconds else 0.0,
            }
        return told

    def timings_json(self) -> dict[str, float]:
        """Return `timings`, an extension: seconds in the queue, of prefill and of decoding."""
        if self.timings is None:
            return {}
        t = self.timings
        return {"queue_s": round(t.queue_s, 6), "prefill_s": round(t.prefill_s, 6), "decode_s": round(t.decode_s, 6)}
