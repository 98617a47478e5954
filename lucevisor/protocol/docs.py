"""Generate the tables of docs/protocol.md from the records and tables of this package.

``python -m lucevisor.protocol.docs`` rewrites the page between its markers; ``--check`` compares.  Not used at runtime.
Invariant: text outside the markers never changes; text between them depends on this package alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lucevisor.protocol.frames import MAX_FLAGS, WITH_DESCRIPTORS
from lucevisor.protocol.messages import KIB, MESSAGES, MIB, MessageKind, StreamKind
from lucevisor.protocol.states import INITIAL, TRANSITIONS

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
COMMAND = "python -m lucevisor.protocol.docs"


def messages() -> str:
    """One row per kind: who sends it where, what it carries, and its limits with their reasons."""
    rows = [
        "| kind | message | stream | from | max metadata | max payload | carries | reason for the limits |",
        "|---:|---|---|---|---:|---:|---|---|",
    ]
    for kind, message in MESSAGES.items():
        extras = [_descriptors(kind)] if kind in WITH_DESCRIPTORS else []
        if kind in MAX_FLAGS:
            extras.append("stage and whether it is posted in flags" if kind is MessageKind.STEP else "stage in flags")
        cells = [
            str(int(kind)),
            f"`{message.record.__name__}`",
            message.stream.value,
            message.sender.value,
            _size(message.max_metadata_bytes),
            _size(message.max_payload_bytes),
            ", ".join(extras),
            message.reason,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def fields() -> str:
    """The fields of each record in encoding order."""
    rows = ["| message | encoded as | fields |", "|---|---|---|"]
    for record in (message.record for message in MESSAGES.values()):
        shape = "array" if record.__struct_config__.array_like else "map"
        names = ", ".join(f"`{name}`" for name in record.__struct_fields__)
        rows.append(f"| `{record.__name__}` | {shape} | {names} |")
    return "\n".join(rows)


def states() -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {INITIAL[StreamKind.LINK].name}"]
    for state, row in TRANSITIONS.items():
        moves: dict[str, list[str]] = {}
        for kind, after in row.items():
            if MESSAGES[kind].stream is StreamKind.LINK:
                moves.setdefault(after.name, []).append(MESSAGES[kind].record.__name__)
        lines += [f"    {state.name} --> {after}: {', '.join(names)}" for after, names in moves.items()]
    return "\n".join([*lines, "```"])


def page(text: str) -> str:
    """``text`` with everything between its markers regenerated."""
    for name, make in (("messages", messages), ("fields", fields), ("states", states)):
        begin, end = f"<!-- {name}: made by {COMMAND} -->", f"<!-- end of {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        block = f"{begin}\n{make()}\n{end}"
        text, n = pattern.subn(lambda _, block=block: block, text)  # type: ignore[misc]  # mypy cannot type the default
        if n != 1:
            raise SystemExit(f"{PAGE.name} has {n} blocks {begin!r} instead of one: restore the markers")
    return text


def main(arguments: list[str]) -> int:
    """Rewrite the page, or with ``--check`` report whether it is up to date."""
    old = PAGE.read_text(encoding="utf-8")
    if "--check" not in arguments:
        PAGE.write_text(page(old), encoding="utf-8")
    elif page(old) != old:
        sys.stderr.write(f"{PAGE} is out of date: run {COMMAND}\n")
        return 1
    return 0


def _descriptors(kind: MessageKind) -> str:
    if kind in (MessageKind.SAVE, MessageKind.RESTORE):
        return "the file's descriptor"
    if kind is MessageKind.LOAD:
        return "two descriptors per arena, then that of the rows to replay"
    return "one descriptor per arena"


def _size(n_bytes: int) -> str:
    if n_bytes == 0:
        return "none"
    return f"{n_bytes // MIB} MiB" if n_bytes >= MIB else f"{n_bytes // KIB} KiB"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
