"""docs/states.md is printed from the transition table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "states.md"


def test_the_page_is_current():
    command = [sys.executable, "-m", "lucevisor.supervision.states", "--diagram"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text() == printed, "run: python -m lucevisor.supervision.states --diagram > docs/states.md"
