"""docs/glossary.md: every concept is found by the field's name for it, and every file named exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "glossary.md"
FIRST = 6
ROW = re.compile(r"^\| (?P<concept>[^|]+) \| `(?P<term>[^`|]+)` \| `(?P<file>[^`|]+)` \|$", re.MULTILINE)
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8").lower()
    for package in ("daemons", "lucevisor")
    for path in (ROOT / package).rglob("*.py")
}
ROWS = [(m["term"], m["file"]) for m in ROW.finditer(PAGE.read_text(encoding="utf-8"))]


def search(term):
    """What ``git grep -ilF TERM -- lucevisor daemons`` lists, in its order."""
    return sorted(name for name, text in TEXTS.items() if term.lower() in text)


def test_forty_concepts_or_more():
    assert len({term for term, _ in ROWS}) >= 40


@pytest.mark.parametrize(("term", "file"), ROWS)
def test_a_concept_is_found_by_its_name(term, file):
    found = search(term)
    assert file in found[:FIRST], f"{term!r}: found first in {found[:FIRST]}; name it in the docstring of {file}"


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`((?:lucevisor|daemons)/[\w/]+\.py)`", PAGE.read_text()))))
def test_a_file_named_exists(file):
    assert file in TEXTS
