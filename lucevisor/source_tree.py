"""Location of the parts of the source tree outside this package: beside it, or inside it in an installed wheel.

The wheel has `daemons` as `lucevisor/_daemons`, so that the supervisor's environment has no importable package of that
name, and the demo and model cards as `lucevisor/_etc` (`[tool.hatch.build.targets.wheel]` in pyproject.toml).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal


def locate(part: Literal["daemons", "etc"]) -> Path:
    """Return the directory of a part; it does not exist where the installation is broken."""
    package = Path(__file__).resolve().parent
    installed = package / f"_{part}"
    return installed if installed.is_dir() else package.parent / part


def module_command() -> list[str]:
    """Return the command line that runs this package; nothing is imported from the current directory, unless this
    package was.
    """
    of_directory = Path(__file__).resolve().parent.parent == Path.cwd()
    return [sys.executable, *([] if of_directory else ["-P"]), "-m", "lucevisor"]
