"""Collects the logits and hidden states that steps return as payload, in the order of positions, each once.

Shapes: T tokens, V vocabulary, L layers, E hidden; all float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lucevisor.engine.pipeline import PipelineResult
from lucevisor.errors import LucevisorError
from lucevisor.protocol.frames import payload_segments
from lucevisor.protocol.messages import MAX_PAYLOAD_BYTES

_FLOAT32_BYTES = 4

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class IdsOutput:
    """``logits [T, V]``; ``hidden [L + 1, T, E]`` (row 0 the embedding output, row i + 1 after layer i), or None."""

    logits: Array
    hidden: Array | None


class RowsMissing(LucevisorError):
    """The payloads do not cover the whole text."""


class RowCollector:
    """Payloads of the steps of one text of ``n_tokens`` tokens."""

    def __init__(self, n_tokens: int, *, hidden: bool) -> None:
        self._n_tokens = n_tokens
        self._wants_hidden = hidden
        self._steps: dict[int, PipelineResult] = {}  # by position of the first row; computed anew if it was preempted

    def add(self, result: PipelineResult) -> None:
        """Keep the payloads of a step whose only slice is of this text."""
        self._steps[result.step.slices[0].start] = result

    def output(self) -> IdsOutput:
        """All rows.  Raises RowsMissing when some are missing, ProtocolError when a payload has a wrong size."""
        steps = [self._steps[start] for start in sorted(self._steps)]
        n_rows = sum(step.step.n_tokens for step in steps)
        if n_rows != self._n_tokens or not steps:
            raise RowsMissing(f"rows of {n_rows} positions came back for {self._n_tokens} tokens; run it again")
        logits = [self._array(step, len(step.results) - 1, "logits") for step in steps]
        if not self._wants_hidden:
            return IdsOutput(np.concatenate(logits), None)
        hidden = [
            np.concatenate([self._array(step, stage, "hidden") for stage in range(len(step.results))]) for step in steps
        ]
        return IdsOutput(np.concatenate(logits), np.concatenate(hidden, axis=1))

    @staticmethod
    def _array(step: PipelineResult, stage: int, name: str) -> Array:
        for segment, shape, data in payload_segments(step.results[stage], step.payloads[stage]):
            if segment == name:
                return np.frombuffer(data.cast("B"), dtype=np.float32).reshape(shape)
        number = step.step.step_id
        raise RowsMissing(
            f"stage {stage} sent no {name} with step {number}; restart its group, it runs another version"
        )


def max_rows_per_step(vocabulary: int, embedding: int, n_layers: int, *, hidden: bool) -> int:
    """Return how many tokens one step may carry so that logits and hidden states fit into one payload, for
    every split."""
    numbers = vocabulary + (embedding * (n_layers + 1) if hidden else 0)
    return max(1, MAX_PAYLOAD_BYTES // (_FLOAT32_BYTES * numbers))
