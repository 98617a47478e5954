"""llama.cpp beside the tests: which interpreter has it, and jobs for it.  See ``llama_cpp_runner.py``.

It runs in a process of its own: what it prints, and a crash, stay out of the test run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

RUNNER = Path(__file__).with_name("llama_cpp_runner.py")
VARIABLE = "LUCEVISOR_ORACLE_PYTHON"


class PeerError(Exception):
    """llama.cpp refused or died; the text ends with what it printed."""


@cache
def interpreter() -> Path | None:
    """The interpreter named in the environment, or the one that ``make oracle`` made; None: there is none."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    made = Path(sys.prefix, "oracle", "bin", "python")
    return made if made.exists() else None


def vocabulary_file(name: str) -> Path | None:
    """A file with the vocabulary of a published model, out of llama.cpp's own tests."""
    python = interpreter()
    path = python and python.parents[1] / "source/vendor/llama.cpp/models" / f"ggml-vocab-{name}.gguf"
    return path if path and path.exists() else None


@dataclass(frozen=True)
class Peer:
    """Gives jobs to llama.cpp; results go through ``folder``."""

    folder: Path

    def run(self, *jobs: dict[str, Any]) -> None:
        """All jobs in one process.  Raises PeerError with the end of what llama.cpp printed."""
        plan = self.folder / "jobs.json"
        plan.write_text(json.dumps(jobs))
        done = subprocess.run(
            [str(interpreter()), str(RUNNER), str(plan)], capture_output=True, text=True, errors="replace", timeout=3600
        )
        if done.returncode:
            raise PeerError(f"exit {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")

    def about(self) -> dict[str, str]:
        """``version`` of llama-cpp-python, ``system``: the processor features that llama.cpp uses."""
        out = self.folder / "about.json"
        self.run({"do": "about", "out": str(out)})
        return json.loads(out.read_text())

    def logits(self, ids: list[int], *models: Path, beta_fast: float | None = None) -> list[np.ndarray]:
        """Logits [T, V] of each file.  ``beta_fast``: YaRN's, which llama.cpp does not read from a file."""
        outs = [self.folder / f"logits-{i}.npy" for i in range(len(models))]
        common = {"do": "logits", "ids": ids, "beta_fast": beta_fast}
        self.run(*(common | {"model": str(m), "out": str(o)} for m, o in zip(models, outs, strict=True)))
        return [np.load(out) for out in outs]

    def scores(self, model: Path, windows: list[list[int]]) -> np.ndarray:
        """The log-probability [n, T - 1] of each id of each window after its first."""
        out = self.folder / "scores.npy"
        self.run({"do": "scores", "model": str(model), "windows": windows, "out": str(out)})
        return np.load(out)

    def greedy(self, model: Path, prompts: list[list[int]], n: int) -> list[dict[str, list[Any]]]:
        """``tokens``: the ``n`` likeliest after each prompt; ``margins``: how far the second best logit was behind."""
        out = self.folder / "greedy.json"
        self.run({"do": "greedy", "model": str(model), "prompts": prompts, "n": n, "out": str(out)})
        return json.loads(out.read_text())

    def quantize(self, source: Path, *steps: tuple[Path, str]) -> None:
        """Each step makes a file of a kind out of the file before it."""
        jobs = []
        for target, kind in steps:
            jobs.append({"do": "quantize", "source": str(source), "target": str(target), "kind": kind})
            source = target
        self.run(*jobs)

    def tokenize(self, model: Path, texts: list[str]) -> dict[str, Any]:
        """``plain`` and ``special``: ids of each text; ``pieces``: the bytes of each token, as hex."""
        out = self.folder / "tokens.json"
        self.run({"do": "tokenize", "model": str(model), "texts": texts, "out": str(out)})
        return json.loads(out.read_text())
