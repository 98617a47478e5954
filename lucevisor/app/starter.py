"""Ties a supervisor's life to the command that started it for itself: `demo` and `chaos`, never `start --daemon`."""

from __future__ import annotations

import ctypes
import os
import signal

from lucevisor.errors import LucevisorError

_PR_SET_PDEATHSIG = 1


def end_with(starter_pid: int) -> None:
    """Have the kernel kill this process when its parent's main thread ends; raise if that has happened already.

    SIGKILL, as for daemons: `chaos` may be killed while the supervisor is stopped, which would keep SIGTERM waiting.
    The daemons end with the supervisor.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != starter_pid:
        raise LucevisorError(f"process {starter_pid}, for which this supervisor was to run, has ended")
