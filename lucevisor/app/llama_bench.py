"""llama.cpp's llama-bench on the same file, and the llama-batched-bench beside it for several streams.

Cases that one call can measure share it, since each call loads the model.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lucevisor.app.bench_cases import SHORT_PROMPT, Case
from lucevisor.errors import LucevisorError

STREAM_ALIGNMENT = 256
"""llama.cpp rounds the context of a stream up to whole multiples of this."""


@dataclass(frozen=True, slots=True)
class LlamaBench:
    """``program``, and arguments for it and llama-batched-bench, such as ``-t 2`` or ``-ngl 99 -fa on``."""

    program: Path
    model: Path
    arguments: Sequence[str] = ()
    timeout_s: float = 3600.0

    @property
    def batched(self) -> Path:
        """The program that decodes several streams at once."""
        return self.program.with_name("llama-batched-bench")

    def run(self, wanted: Sequence[Case]) -> dict[Case, float]:
        """Tokens/s of one repetition each, after the programs' own warm-up; without several streams if only
        llama-bench is there.  Raises LucevisorError.
        """
        found: dict[Case, float] = {}
        alone = [case for case in wanted if case.streams == 1]
        for depth in dict.fromkeys(case.depth for case in alone):
            found |= self._alone([case for case in alone if case.depth == depth], depth)
        for answer in dict.fromkeys(case.answer for case in wanted if case.streams > 1):
            if self.batched.exists():
                found |= self._together([c for c in wanted if c.streams > 1 and c.answer == answer], answer)
        return found

    def _alone(self, wanted: Sequence[Case], depth: int) -> dict[Case, float]:
        """Cases of one stream and depth: llama-bench has a result for each prompt and each answer."""
        prompts, answers = (
            ",".join(str(n) for n in sorted({n for n in lengths if n})) or "0"
            for lengths in ([c.prompt for c in wanted], [c.answer for c in wanted])
        )
        command = [str(self.program), "-m", str(self.model), "-p", prompts, "-n", answers]
        command += [*(["-d", str(depth)] if depth else []), "-r", "1", "-o", "json", *self.arguments]
        said = self._output(command)
        try:
            rates = {(int(row["n_prompt"]), int(row["n_gen"])): float(row["avg_ts"]) for row in json.loads(said)}
            return {case: rates[case.prompt, case.answer] for case in wanted}
        except (ValueError, KeyError, TypeError) as error:
            raise LucevisorError(f"{self.program} printed no result of llama-bench: {said[:200]!r}") from error

    def _together(self, wanted: Sequence[Case], answer: int) -> dict[Case, float]:
        """Cases of several streams with the same answer."""
        streams = sorted({case.streams for case in wanted})
        context = -(-(SHORT_PROMPT + answer) // STREAM_ALIGNMENT) * STREAM_ALIGNMENT * streams[-1]
        command = [str(self.batched), "-m", str(self.model), "-c", str(context), "-npp", str(SHORT_PROMPT)]
        command += ["-ntg", str(answer), "-npl", ",".join(map(str, streams)), "--output-format", "jsonl"]
        said = self._output([*command, *self.arguments])
        try:
            rows: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
            rates = {int(row["pl"]): float(row["speed_tg"]) for row in rows}
            return {case: rates[case.streams] for case in wanted}
        except (ValueError, KeyError, TypeError) as error:
            raise LucevisorError(f"{self.batched} printed no result of llama-batched-bench: {said[:200]!r}") from error

    def _output(self, command: Sequence[str]) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LucevisorError(f"{command[0]}: {error}") from error
        if done.returncode:
            raise LucevisorError(f"{command[0]} ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout
