"""docs/request-trace.md names only files and symbols that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "request-trace.md"
REFERENCES = sorted(set(re.findall(r"`((?:lucevisor|daemons)/[\w/]+\.py):([\w.]+)`", PAGE.read_text(encoding="utf-8"))))


def symbols(path):
    """Names defined at the top of a module and in its classes, as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{method.name}" for method in methods)
    return found


@pytest.mark.parametrize(("file", "symbol"), REFERENCES)
def test_reference_exists(file, symbol):
    assert symbol in symbols(ROOT / file)
