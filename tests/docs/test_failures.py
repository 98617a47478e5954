"""Every failure in docs/failures.md names tests that are there; and every kind of failure we know of has a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "failures.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def rows() -> list[list[str]]:
    """The cells of every row but headings."""
    found = [line.strip().strip("|").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in found if cells[0].strip() != "failure"]


@pytest.mark.parametrize("cells", rows(), ids=lambda cells: cells[0][:60])
def test_a_failure_says_what_happens_and_names_tests_that_exist(cells: list[str]) -> None:
    assert len(cells) == 3, "failure | what happens | tests"
    assert all(cells)
    named = TEST.findall(cells[2])
    assert named, f"no test: {cells[2]}"
    assert TEST.sub("", cells[2]).strip(", ") == "", f"something else than tests: {cells[2]}"
    for file, test in named:
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"


def test_no_failure_is_listed_twice() -> None:
    failures = [cells[0] for cells in rows()]
    assert len(set(failures)) == len(failures) > 60
