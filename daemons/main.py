"""A daemon's life around its work: tied to its parent, pinned, reporting, ended in order.

Knows no torch: `daemons.worker` does, and is imported last, when the process can already be ended, asked for its
stacks and heard. Invariants: the process does not outlive its parent; every way out has an exit code (0 in order, 1
failed, 78 would fail again) and, while the link stands, a `Failed` that says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from daemons.errors import describe
from daemons.options import Options, parse
from daemons.pulse import Reporter
from lucevisor.protocol.blocking_link import BlockingLink
from lucevisor.protocol.errors import LinkClosed, LocalProtocolError
from lucevisor.protocol.exit_codes import EXIT_CONFIGURATION, EXIT_FAILED
from lucevisor.protocol.messages import Failed
from lucevisor.protocol.states import Channel

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Run a daemon and return its exit code."""
    options = parse(argv)
    _die_with_parent(options.parent_pid)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's business
    if options.cores:
        os.sched_setaffinity(0, options.cores)  # before torch counts them and starts threads
    link_socket = _inherited(options.link_fd)
    pulse_socket = _inherited(options.pulse_fd)
    link = BlockingLink(link_socket, name=f"{options.group} link")
    pulse = BlockingLink(pulse_socket, channel=Channel.PULSE, name=f"{options.group} pulse")
    reporter = Reporter(pulse, on_lost=_terminate_self)
    _exit_in_order_on_sigterm(link_socket, reporter)
    reporter.start()
    try:
        return _serve(link, reporter, options)
    finally:
        reporter.close()


def _serve(link: BlockingLink, reporter: Reporter, options: Options) -> int:
    try:
        from daemons.worker import serve
    except ImportError as error:
        traceback.print_exc()
        advice = f"install torch, numpy, gguf and msgspec for {sys.executable}, or set groups.{options.group}.python"
        _tell(link, Failed("start", options.group, f"import failed: {error}", advice, configuration=True))
        return EXIT_CONFIGURATION
    try:
        return serve(link, reporter, options)
    except Exception as error:
        traceback.print_exc()
        advice = "see the daemon's log; report it if the same request fails again"
        details = traceback.format_exc()
        failed = Failed(reporter.phase_now, options.group, describe(error), advice, details=details)
        _tell(link, failed)
        return EXIT_FAILED


def _tell(link: BlockingLink, failed: Failed) -> None:
    """Send the reason of the end while there is somebody to hear it; stderr has it in any case."""
    with contextlib.suppress(LinkClosed, LocalProtocolError):
        link.send(failed)


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the supervisor's main thread ends; exit now if that happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        print(
            f"the supervisor (process {parent_pid}) is not the parent of this daemon: it ended, or the group's python "
            "is a wrapper that forks instead of calling exec",
            file=sys.stderr,
        )
        sys.exit(EXIT_CONFIGURATION)


def _inherited(fd: int) -> socket.socket:
    """Return the socket behind an inherited descriptor, closed in any process this one starts."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


def _exit_in_order_on_sigterm(link_socket: socket.socket, reporter: Reporter) -> None:
    def on_sigterm(_number: int, _frame: FrameType | None) -> None:
        if reporter.phase_now == "start":
            # Packages catch an exception inside an import and try again another way: leave at once, nothing is held.
            os._exit(0)
        if reporter.phase_now in ("idle", "step"):
            with contextlib.suppress(OSError):  # closed already: the loop that reads it is ending
                link_socket.shutdown(socket.SHUT_RD)  # the next receive sees the end of file, after the present step
        else:
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)


def _terminate_self() -> None:
    """The supervisor closed the pulse: end like on SIGTERM, also in the middle of a load."""
    os.kill(os.getpid(), signal.SIGTERM)
