"""The command line of a test (:meth:`tests.daemon_forks.Forker.command`): its daemons are forked."""

from __future__ import annotations

from lucevisor.cli import main
from tests.daemon_forks import Forker

if __name__ == "__main__":
    with Forker.inherited().installed():
        main()
