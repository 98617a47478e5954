"""The daemon that computes nothing (bench/paced_daemon.py) is called as a real one, and answers as one."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from make_gguf import write
from scale_paced import wide_model

from daemons.runner import ModelRunner

ROOT = Path(__file__).parents[2]
PACED = ROOT / "bench" / "paced_daemon.py"


def test_its_step_takes_what_a_real_step_takes() -> None:
    functions = {one.name: one for one in ast.parse(PACED.read_text()).body if isinstance(one, ast.FunctionDef)}
    taken = [argument.arg for argument in functions["run_step"].args.args]
    assert taken == [*signature(ModelRunner.run_step).parameters]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_a_pipeline_of_two_decodes_and_computes_prompts(tmp_path: Path, transport: str) -> None:
    """A stage sleeps for 2 ms, so one stream gets at most 250 tokens/s; a daemon that fails its steps gets none."""
    write(tmp_path / "wide.gguf", wide_model())
    cell = {"hosts": 2, "transport": transport, "streams": [1, 4], "stage_s": 0.002, "row_s": 1e-5, "chunk": 64}
    cell |= {"chunks": 2, "answer": 20, "rounds": 1}
    command = [sys.executable, str(ROOT / "bench" / "scale_paced.py"), str(tmp_path / "wide.gguf"), json.dumps(cell)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120, cwd=ROOT, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert 1 < found["decode"]["1"][0] < 250
    assert found["decode"]["4"][0] > found["decode"]["1"][0]
    assert len(found["prompt_s"]) == 3
