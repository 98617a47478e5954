"""Fault hooks of `lucevisor chaos`: faults that only the process itself can have.

Off unless ``LUCEVISOR_FAULTS`` names a directory, which `lucevisor start` refuses without ``--allow-faults``. A process
listens there on a datagram socket named after its pid; a message is the name of a hook and a number of seconds."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

VARIABLE: Final = "LUCEVISOR_FAULTS"
_MAX_BYTES: Final = 256

Hook = Callable[[float], None]


def listen(hooks: Mapping[str, Hook]) -> None:
    """Start the thread that runs ``hooks``; does nothing unless the variable is set."""
    directory = os.environ.get(VARIABLE, "")
    if not directory:
        return
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    path = Path(directory) / str(os.getpid())
    path.unlink(missing_ok=True)  # of a process that had this pid
    sock.bind(str(path))
    threading.Thread(target=_run, args=(sock, dict(hooks)), name="faults", daemon=True).start()


def _run(sock: socket.socket, hooks: Mapping[str, Hook]) -> None:
    while True:
        name, _, seconds = sock.recv(_MAX_BYTES).decode().partition(" ")
        print(f"fault: {name} {seconds}", file=sys.stderr, flush=True)
        hooks[name](float(seconds))


def inject(directory: Path, pid: int, name: str, seconds: float) -> None:
    """Let a process have a fault.  Raises OSError when it does not listen."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(f"{name} {seconds}".encode(), str(directory / str(pid)))


def hold_interpreter(seconds: float) -> None:
    """Keep all Python threads of this process from running, as a C call does that never gives the lock back."""
    ctypes.PyDLL(None).sleep(int(seconds))


def shift_clock(seconds: float) -> None:
    """Move the wall clock of this process."""
    now = time.time
    time.time = lambda: now() + seconds
