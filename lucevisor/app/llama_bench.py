"""llama.cpp's llama-bench on the same file, a case at a time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lucevisor.errors import LucevisorError


@dataclass(frozen=True, slots=True)
class LlamaBench:
    """``program`` and what is given to it, such as ``-t 2`` or ``-ngl 99 -fa on``."""

    program: Path
    model: Path
    arguments: Sequence[str] = ()
    timeout_s: float = 3600.0

    def run(self, *, prompt: int, answer: int, depth: int) -> float:
        """Tokens/s of one repetition after llama-bench's own warm-up.  Raises LucevisorError."""
        command = [str(self.program), "-m", str(self.model), "-p", str(prompt), "-n", str(answer)]
        command += [*(["-d", str(depth)] if depth else []), "-r", "1", "-o", "json", *self.arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LucevisorError(f"{self.program}: {error}") from error
        if done.returncode:
            raise LucevisorError(f"{self.program} ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        try:
            [found] = json.loads(done.stdout)
            return float(found["avg_ts"])
        except (ValueError, KeyError, TypeError) as error:
            raise LucevisorError(f"{self.program} printed no result of llama-bench: {done.stdout[:200]!r}") from error
