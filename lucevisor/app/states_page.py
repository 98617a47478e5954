"""Prints docs/states.md from the transition tables of backend groups and of the engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum

from lucevisor.engine import events
from lucevisor.supervision import events as group_events

_HEAD = """# States

Printed from the transition tables by `python -m lucevisor.app.states_page > docs/states.md`; a test checks that it is
current.
"""


def _section(title: str, first: Enum, table: Mapping[Enum, Mapping[Enum, str]]) -> str:
    moves = [(before.name, after.name, cause) for before, causes in table.items() for after, cause in causes.items()]
    lines = [f"## {title}", "", "```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [f"    {before} --> {after}: {cause.replace(';', ',')}" for before, after, cause in moves]
    lines += ["```", "", "| from | to | when |", "|---|---|---|"]
    lines += [f"| {before} | {after} | {cause} |" for before, after, cause in moves]
    return "\n".join([*lines, ""])


def page() -> str:
    return "\n".join(
        [
            _HEAD,
            _section("A backend group", group_events.State.STOPPED, group_events.TRANSITIONS),  # type: ignore[arg-type]
            _section("The engine", events.EngineState.UNAVAILABLE, events.TRANSITIONS),  # type: ignore[arg-type]
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(page())
