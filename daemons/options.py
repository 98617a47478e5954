"""The command line of a daemon, as the supervisor's launcher writes it.

Imports no torch and opens nothing.  Invariant: what every daemon needs is required, so one started by hand fails with
usage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from lucevisor.model.values import Backend


@dataclass(frozen=True, slots=True)
class Options:
    """Options from the supervisor.

    `links` and `heartbeat` are addresses, with a link for each model.  `threads` 0: torch's choice; `cores` empty: no
    pinning.  `secret`: a descriptor to read the key of TCP connections from; None without such.  `rows`: the address to
    listen at for rows of neighbours; empty where all share memory.  `files`: addresses for files, one for each link
    over TCP.  `tls`: files of a certificate and its key, if connections are encrypted.  `cache_dir`: where copies of
    model files are kept; empty: in the user's cache directory.
    """

    group: str
    backend: Backend
    links: Sequence[str]
    heartbeat: str
    parent_pid: int
    threads: int
    cores: tuple[int, ...]
    secret: int | None = None
    rows: str = ""
    files: Sequence[str] = ()
    tls: Sequence[str] = ()
    cache_dir: str = ""


def parse(argv: Sequence[str]) -> Options:
    """Return the options in `argv`; an invalid command line exits with usage and code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m daemons", description="A shard daemon; started by `lucevisor start`."
    )
    parser.add_argument("--group", required=True)
    parser.add_argument("--backend", required=True, type=Backend, choices=list(Backend))
    addresses = "fd:NUMBER or tcp:HOST:PORT/CHANNEL, once for each model"
    parser.add_argument("--link", dest="links", required=True, action="append", help=addresses)
    parser.add_argument("--heartbeat", required=True, help="as --link")
    parser.add_argument("--parent-pid", required=True, type=int)
    parser.add_argument("--threads", required=True, type=int)
    parser.add_argument("--cores", required=True, type=_numbers, help="comma-separated, empty for no pinning")
    parser.add_argument("--secret", required=True, help="descriptor with the key of connections, empty for none")
    parser.add_argument("--rows", required=True, help="address to listen at for rows, empty for none; over TCP its own")
    parser.add_argument("--files", action="append", default=[], help="as --link, once for each link over TCP")
    parser.add_argument("--tls", action="append", default=[], help="a certificate's file, then its key's")
    parser.add_argument("--cache-dir", default="", help="directory for copies of model files")
    given = parser.parse_args(argv)
    given.secret = int(given.secret) if given.secret else None
    return Options(**vars(given))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
