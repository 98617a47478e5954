"""docs/configuration.md from the configuration's types: `python -m lucevisor.config.docs [--check]`.

Knows nothing of any configuration that was loaded. Invariant: every key of the schema is on the page once, with the
default that `load` gives.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lucevisor.config.effects import UNIMPLEMENTED
from lucevisor.config.schema import GROUPS, SECTIONS, FieldKey, keys_of
from lucevisor.config.sections import GroupConfig
from lucevisor.config.strict import SIZE_UNITS, Size
from lucevisor.errors import ExitCode, show

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

<!-- Made by `python -m lucevisor.config.docs` from lucevisor/config/sections.py. Change it there. -->

One TOML file says what is served, on which devices and how. `etc/lucevisor.toml` shows every key, `etc/demo.toml` is
the demo, `etc/lucebox3.toml` a box with an NVIDIA and an AMD GPU. `lucevisor plan FILE` reads a file and says what
would be started, without starting it.

- A key that is not listed here is an error that names the nearest one. All errors of a file are told at once, and
  nothing is started: exit code 2.
- Any key can be given on the command line, over the file: `--set placement.target_layer_split=0.3,0.7`,
  `--set groups.left.threads=2`, `--set groups.left.env.OMP_NUM_THREADS=1`. Lists are separated by commas, `[]` is the
  empty list; one `--set` for each key.
- Numbers that come as text are plain decimal: no blanks, `+5`, `0x10`, `1_000`, `007`, `nan`, `inf`. An integer is
  taken where a number is wanted; `true` is never a number.
- Sizes are bytes as an integer, or text of an integer and `KiB`, `MiB` or `GiB` with nothing between: `"512MiB"`. Not
  `MB`, not `1.5GiB`, not `1 GiB`.
- Paths may start with `~/`; relative ones start at the folder of the configuration file, also when they come from
  `--set`.
- No option is dropped in silence. One that asks for a feature this version lacks is refused where ignoring it could
  change answers or a promise; any other option without effect is warned about by name.
"""


def page() -> str:
    """Return docs/configuration.md."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    for name, section in SECTIONS.items():
        yield from _section(name, section)
        if name == "model":
            yield from _section(f"{GROUPS}.NAME", GroupConfig)


def _section(name: str, section: type[Any]) -> Iterator[str]:
    yield f"## `[{name}]`\n"
    yield f"{_paragraph(section)}\n"
    yield "| key | default | values | meaning |"
    yield "|---|---|---|---|"
    for key, each in keys_of(section).items():
        cells = (f"`{key}`", default_of(each), _values(each), f"{each.key.text}{_missing(f'{name}.{key}')}")
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _paragraph(section: type[Any]) -> str:
    return " ".join((inspect.getdoc(section) or "").split())


def default_of(each: FieldKey) -> str:
    """Return a key's default as the file would hold it, in Markdown."""
    if each.required:
        return "required"
    if isinstance(each.key.kind, Size):
        return f"`{_size(each.default)}`"
    return f"`{show(each.key.kind.write(each.default))}`"


def _size(size_bytes: int) -> str:
    """Return bytes in the largest unit that divides them."""
    for unit, unit_bytes in reversed(SIZE_UNITS.items()):
        if size_bytes and size_bytes % unit_bytes == 0:
            return f'"{size_bytes // unit_bytes}{unit}"'
    return str(size_bytes)


def _values(each: FieldKey) -> str:
    values = each.key.kind.allowed()
    return f"{values}; {each.key.unit}" if each.key.unit and each.key.unit not in values else values


def _missing(key: str) -> str:
    row = UNIMPLEMENTED.get(key)
    if row is None:
        return ""
    effect = "asking for it is refused" if row.refused else "the key has no effect"
    return f" *Not built yet: {row.what}; {effect}.*"


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Write the page, or with `--check` compare it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lucevisor.config.docs", description="Make docs/configuration.md.")
    parser.add_argument(
        "--check", action="store_true", help="compare the file with what would be written, change nothing"
    )
    parser.add_argument("--file", type=Path, default=PAGE, help=f"the page (default: {PAGE.parent.name}/{PAGE.name})")
    options = parser.parse_args(arguments)
    made = page()
    if not options.check:
        options.file.write_text(made, encoding="utf-8")
        return ExitCode.DONE
    found = options.file.read_text(encoding="utf-8") if options.file.exists() else ""
    if found == made:
        return ExitCode.DONE
    difference = difflib.unified_diff(
        found.splitlines(), made.splitlines(), "as it is", "as the types say", lineterm="", n=0
    )
    print("\n".join(difference))
    print(f"{options.file.name} differs from the types: run python -m lucevisor.config.docs", file=sys.stderr)
    return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
