"""docs/states.md is printed from the transition table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lucevisor.supervision.states import TRANSITIONS, diagram

PAGE = Path(__file__).parents[2] / "docs" / "states.md"


def test_the_page_is_current():
    command = [sys.executable, "-m", "lucevisor.supervision.states", "--diagram"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text() == printed, "run: python -m lucevisor.supervision.states --diagram > docs/states.md"


def test_the_diagram_has_every_move_and_labels_mermaid_can_read():
    lines = diagram().splitlines()
    moves = [line for line in lines if "-->" in line and "[*]" not in line]
    assert len(moves) == sum(map(len, TRANSITIONS.values()))
    for move in moves:
        assert move.count(":") == 1
        assert ";" not in move
