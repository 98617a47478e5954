"""What :meth:`tests.daemon_forks.Forker.command` runs: a script, or ``lucevisor`` for the command line, with arguments.
Daemons that it starts are forked.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path

from lucevisor.cli import main
from tests.daemon_forks import Forker


def run(arguments: Sequence[str]) -> None:
    """Run the command line, as a fork that has it imported."""
    sys.argv = list(arguments)
    forker = Forker.inherited()
    util.spawnv_passfds = forker.spawn  # type: ignore[attr-defined]
    with forker.installed():
        main()


if __name__ == "__main__":
    del sys.argv[0]
    with Forker.inherited().installed():
        if sys.argv[0] == "lucevisor":
            main()
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
