"""The cores of this process.  The only module that changes them.

Invariant: what this thread was kept to does not count as what it may use.  Daemons that it starts inherit it, unless
they are pinned.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

_all_cores: list[int] = []  # while this thread is kept to some of them


def usable_cores() -> list[int]:
    """Return the cores that this process and its daemons may use."""
    return list(_all_cores) or sorted(os.sched_getaffinity(0))


def keep_to(cores: Collection[int]) -> None:
    """Keep this thread, and those that it starts, to some of its usable cores; none: let it have all of them again."""
    usable = usable_cores()
    with suppress(OSError):  # they were taken away since
        os.sched_setaffinity(0, cores or usable)
        _all_cores[:] = usable if cores else []


def take_all() -> None:
    """Let this thread, and what it starts, have all usable cores: for programs that are none of the service's."""
    with suppress(OSError):  # as in keep_to
        os.sched_setaffinity(0, usable_cores())
