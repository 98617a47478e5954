"""The `llm` command line, with a schema and with a tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scenario import LOOK_UP, MODEL, QUESTION, URL, run

HOME = Path(tempfile.mkdtemp())
(HOME / "extra-openai-models.yaml").write_text(
    f"- model_id: local\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  supports_schema: true\n  supports_tools: true\n"
)
FUNCTION = "def get_doc(name: str) -> str:\n    'Get the documentation of a Python object.'\n    return name + ' joins'"


def llm(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "llm", "-m", "local", "--key", "none", "--no-log", *arguments],
        env={**os.environ, "LLM_USER_PATH": str(HOME)}, text=True, capture_output=True, check=True, timeout=60,
        stdin=subprocess.DEVNULL,
    ).stdout  # fmt: skip


def prompt() -> None:
    assert llm(QUESTION, "-o", "max_tokens", "40").strip()


def not_streamed() -> None:
    assert llm(QUESTION, "--no-stream", "-o", "max_tokens", "40").strip()


def schema() -> None:
    answer = json.loads(llm("--schema", "module str, level int", QUESTION))
    assert isinstance(answer["level"], int)


def tool() -> None:
    assert llm(
        "--functions", FUNCTION, LOOK_UP, "--chain-limit", "3", "-o", "max_tokens", "200", "-o", "temperature", "0"
    ).strip()


run({"prompt": prompt, "--no-stream": not_streamed, "--schema": schema, "--functions": tool})
