"""The tables of docs/protocol.md, printed from the records and tables that the code runs on.

``python -m lucevisor.protocol.docs`` rewrites the parts of the page between its markers, ``--check`` compares them.
Not used at run time.  Invariant: prose stays as written; what stands between markers is a function of this package.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lucevisor.protocol.codec import WITH_DESCRIPTORS
from lucevisor.protocol.frames import KIB, LIMITS, MAX_FLAGS, MIB
from lucevisor.protocol.messages import MESSAGES, MessageKind
from lucevisor.protocol.states import INITIAL, SENDERS, TRANSITIONS, Channel

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
COMMAND = "python -m lucevisor.protocol.docs"


def messages() -> str:
    """One row a kind: who sends it where, what it carries, and its limits with their reasons."""
    rows = [
        "| kind | message | channel | from | metadata at most | payload at most | with it | why these limits |",
        "|---:|---|---|---|---:|---:|---|---|",
    ]
    for kind, record in MESSAGES.items():
        channel, sender = SENDERS[kind]
        extras = [_descriptors(kind)] if kind in WITH_DESCRIPTORS else []
        if kind in MAX_FLAGS:
            extras.append("stage in flags")
        limits = LIMITS[kind]
        cells = [
            str(int(kind)),
            f"`{record.__name__}`",
            channel.value,
            sender.value,
            _size(limits.metadata_bytes),
            _size(limits.payload_bytes),
            ", ".join(extras),
            limits.reason,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def fields() -> str:
    """The fields of each record in encoding order."""
    rows = ["| message | written as | fields |", "|---|---|---|"]
    for record in MESSAGES.values():
        shape = "array" if record.__struct_config__.array_like else "map"
        names = ", ".join(f"`{name}`" for name in record.__struct_fields__)
        rows.append(f"| `{record.__name__}` | {shape} | {names} |")
    return "\n".join(rows)


def states() -> str:
    """The order of messages on a link as a diagram.  Messages that change nothing are listed, not drawn."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {INITIAL[Channel.LINK].name}"]
    for state, row in TRANSITIONS.items():
        moves: dict[str, list[str]] = {}
        for kind, after in row.items():
            if SENDERS[kind][0] is Channel.LINK:
                moves.setdefault(after.name, []).append(MESSAGES[kind].__name__)
        lines += [f"    {state.name} --> {after}: {', '.join(names)}" for after, names in moves.items()]
    return "\n".join([*lines, "```"])


def page(text: str) -> str:
    """``text`` with everything between its markers made anew."""
    for name, make in (("messages", messages), ("fields", fields), ("states", states)):
        begin, end = f"<!-- {name}: made by {COMMAND} -->", f"<!-- end of {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        block = f"{begin}\n{make()}\n{end}"
        text, n = pattern.subn(lambda _, block=block: block, text)  # type: ignore[misc]  # mypy cannot type the default
        if n != 1:
            raise SystemExit(f"{PAGE.name} has {n} blocks {begin!r}, needs one: restore the markers")
    return text


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` say whether it is current."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write(f"usage: {COMMAND} [--check]\n")
        return 2
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if new == old:
        return 0
    if arguments:
        sys.stderr.write(f"{PAGE} is not current: run {COMMAND}\n")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


def _descriptors(kind: MessageKind) -> str:
    return "the file's descriptor" if kind in (MessageKind.SAVE, MessageKind.RESTORE) else "one descriptor an arena"


def _size(n_bytes: int) -> str:
    if n_bytes == 0:
        return "none"
    return f"{n_bytes // MIB} MiB" if n_bytes >= MIB else f"{n_bytes // KIB} KiB"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
