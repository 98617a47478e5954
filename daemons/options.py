"""The command line of a daemon, as the supervisor's launcher writes it.

Knows no torch and opens nothing.  Invariant: every option is required, so a daemon started by hand fails with usage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from lucevisor.model.values import Backend


@dataclass(frozen=True, slots=True)
class Options:
    """Options from the supervisor.  `threads` 0: torch's choice; `cores` empty: no pinning."""

    group: str
    backend: Backend
    link_fd: int
    pulse_fd: int
    parent_pid: int
    threads: int
    cores: tuple[int, ...]


def parse(argv: Sequence[str]) -> Options:
    """Return the options in `argv`; an invalid command line exits with usage and code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m daemons", description="A shard daemon; started by `lucevisor start`."
    )
    parser.add_argument("--group", required=True)
    parser.add_argument("--backend", required=True, choices=[backend.value for backend in Backend])
    parser.add_argument("--link-fd", required=True, type=int)
    parser.add_argument("--pulse-fd", required=True, type=int)
    parser.add_argument("--parent-pid", required=True, type=int)
    parser.add_argument("--threads", required=True, type=int)
    parser.add_argument("--cores", required=True, help="comma-separated, empty for no pinning")
    given = parser.parse_args(argv)
    return Options(
        group=given.group,
        backend=Backend(given.backend),
        link_fd=given.link_fd,
        pulse_fd=given.pulse_fd,
        parent_pid=given.parent_pid,
        threads=given.threads,
        cores=tuple(int(core) for core in given.cores.split(",") if core),
    )
