"""The tables of docs/features.md: mistakes, each typed or sent by a test as it stands there, and features."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "features.md"


def table(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, as cells without the backticks around them."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    # a bar inside a cell is written \|
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines[2:]]
    return [[cell.removeprefix("`").removesuffix("`").replace("\\|", "|") for cell in row] for row in rows]
