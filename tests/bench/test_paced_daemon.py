"""The daemon that computes nothing (bench/paced_daemon.py) is called as a real one."""

from __future__ import annotations

import ast
from inspect import signature
from pathlib import Path

from daemons.runner import ModelRunner

PACED = Path(__file__).parents[2] / "bench" / "paced_daemon.py"


def test_its_step_takes_what_a_real_step_takes() -> None:
    functions = {one.name: one for one in ast.parse(PACED.read_text()).body if isinstance(one, ast.FunctionDef)}
    taken = [argument.arg for argument in functions["run_step"].args.args]
    assert taken == [*signature(ModelRunner.run_step).parameters]
