"""What keeps the code readable: short files and functions, one class of a name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_LINES = 60
MANY_MODULES = 25


@cache
def sources() -> dict[Path, str]:
    return {p.relative_to(ROOT): p.read_text() for top in ("lucevisor", "daemons") for p in (ROOT / top).rglob("*.py")}


def long_functions(text: str) -> list[str]:
    """Functions of more than FUNCTION_LINES without a reason: a comment "Long: ..." above it."""
    lines, found = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assert node.end_lineno is not None
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if node.end_lineno - node.lineno >= FUNCTION_LINES and "# Long: " not in lines[max(0, first - 2)]:
            found.append(node.name)
    return found


def test_no_function_is_long_without_a_reason() -> None:
    assert {str(path): found for path, text in sources().items() if (found := long_functions(text))} == {}


@pytest.mark.parametrize(("above", "found"), [("", ["f"]), ("# Long: a table.\n", []), ("# short\n", ["f"])])
def test_a_long_function_is_found(above: str, found: list[str]) -> None:
    body = "    x = 1\n" * FUNCTION_LINES
    assert long_functions(f"{above}@decorated\ndef f():\n{body}") == found


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def crowded() -> dict[Path, set[str]]:
    """The modules of packages that have many."""
    modules = defaultdict(set)
    for path in sources():
        if path.stem not in ("__init__", "__main__"):
            modules[path.parent].add(path.stem)
    return {package: names for package, names in modules.items() if len(names) >= MANY_MODULES}


@pytest.mark.parametrize("package", crowded(), ids=str)
def test_a_package_of_many_modules_says_where_to_look(package: Path) -> None:
    summary, _, table = (ast.get_docstring(ast.parse(sources()[package / "__init__.py"])) or "").partition("\n\n")
    assert summary
    listed = set(re.findall(r"\b[a-z][a-z_]+\b", re.sub(r"^ *\S.*?  +", "", table, flags=re.MULTILINE)))
    assert crowded()[package] <= listed, "name each module in the package's docstring"
