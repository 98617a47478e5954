"""Runs a command as systemd does that opened a socket for it: ``python -m tests.socket_activation FD COMMAND...``."""

from __future__ import annotations

import os
import sys

FIRST_FD = 3

if __name__ == "__main__":
    os.dup2(int(sys.argv[1]), FIRST_FD)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    os.execv(sys.argv[2], sys.argv[2:])
