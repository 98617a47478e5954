"""The end of a daemon's process: its exit codes, and its tie to the supervisor."""

from __future__ import annotations

import ctypes
import os
import signal

EXIT_FAILED = 1
EXIT_CONFIGURATION = 78
"""The same start would fail again, so it is not retried (EX_CONFIG of sysexits.h)."""


def end_with_parent(parent_pid: int) -> bool:
    """Have the kernel kill this process when its parent's main thread ends.

    Returns False if ``parent_pid`` is not the parent: it has ended before.  Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(1, int(signal.SIGKILL), 0, 0, 0) != 0:  # PR_SET_PDEATHSIG
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    return os.getppid() == parent_pid
