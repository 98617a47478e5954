"""The limit of open files of this process.

Connections are descriptors, and so are links, pipes and the files that starting a daemon needs: connections get what
those leave.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final

_WANTED: Final = 65536
_RESERVED: Final = 192
_RESERVED_PER_GROUP: Final = 16


def raise_limit() -> int:
    """Raise the limit of open files as far as the hard limit allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WANTED if soft == resource.RLIM_INFINITY else soft


def connections_within(n_files: int, n_groups: int) -> int:
    """Return how many of ``n_files`` connections may use; at least a quarter of them."""
    return max(n_files // 4, n_files - _RESERVED - _RESERVED_PER_GROUP * n_groups)
