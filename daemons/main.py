"""A daemon's process: tied to its parent, pinned to cores, reporting, ending in order.

Knows no torch: `daemons.worker` does and is imported last, once the process can be stopped, dump its stacks and report.
Invariants: the process does not outlive its parent; every exit has a code (0 orderly, 1 failed, 78 would fail again)
and, while the link is up, a `Failed` with the reason.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import FrameType

from daemons.compute_lock import ComputeLock
from daemons.errors import describe
from daemons.heartbeat import Reporter
from daemons.options import Options, parse
from lucevisor.protocol import fault_hooks
from lucevisor.protocol.authentication import AuthenticationError, Purpose, read_key
from lucevisor.protocol.errors import LinkClosed, LocalProtocolError
from lucevisor.protocol.files import FileClient
from lucevisor.protocol.messages import Failed, StreamKind
from lucevisor.protocol.process import EXIT_CONFIGURATION, EXIT_FAILED, end_with_parent
from lucevisor.protocol.tcp import Credentials, connect, local_address
from lucevisor.protocol.threads import StartedThread
from lucevisor.protocol.transport import BlockingLink, inherited_socket

_CONNECT_S = 30.0
"""Time to reach the supervisor, whose host may be away for a moment."""


def main(argv: Sequence[str]) -> int:
    """Run a daemon and return its exit code."""
    options = parse(argv)
    _die_with_parent(options.parent_pid)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    if options.cores:
        os.sched_setaffinity(0, options.cores)  # before torch counts them and starts threads
    try:
        key = b"" if options.secret is None else read_key(options.secret)
        credentials = Credentials.of(key, *options.tls)
    except ValueError as error:
        print(f"the cluster's secret {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except OSError as error:
        print(f"the secret, or {' and '.join(options.tls)} for TLS, cannot be used: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    try:
        sockets = [_open(link, credentials, Purpose.LINK) for link in options.links]
        heartbeat_socket = _open(options.heartbeat, credentials, Purpose.HEARTBEAT)
        file_sockets = [_open(address, credentials, Purpose.FILES) for address in options.files]
        kind, _, place = options.heartbeat.partition(":")
        if options.rows and kind == "tcp":
            options = replace(options, rows=local_address(place.partition("/")[0]))  # others reach it there, too
    except (OSError, AuthenticationError) as error:  # it may pass
        address = options.heartbeat.partition("/")[0]
        print(f"the supervisor cannot be reached at {address}: {error}", file=sys.stderr)
        return EXIT_FAILED
    link_name, numbers_files = f"{options.group} link", bool(options.files)
    links = [BlockingLink(sock, name=link_name, numbers_files=numbers_files) for sock in sockets]
    files = [BlockingLink(sock, stream=StreamKind.FILES, name=f"{options.group} files") for sock in file_sockets]
    heartbeat = BlockingLink(heartbeat_socket, stream=StreamKind.HEARTBEAT, name=f"{options.group} heartbeat")
    reporter = Reporter(heartbeat, on_lost=_terminate_self)
    _exit_in_order_on_sigterm(sockets, reporter)
    reporter.start()
    hooks = {"hang": fault_hooks.hold_interpreter, "mute": reporter.mute, "clock": fault_hooks.shift_clock}
    fault_hooks.listen(hooks)
    try:
        return _serve_all(links, files, reporter, options, credentials)
    finally:
        reporter.close()


def _open(address: str, credentials: Credentials, purpose: Purpose) -> socket.socket:
    """Return the socket of a link, of a heartbeat or for files.  Raises OSError, AuthenticationError."""
    kind, _, place = address.partition(":")
    if kind == "fd":
        return inherited_socket(int(place))
    address, _, channel = place.partition("/")
    return connect(address, credentials, purpose, bytes.fromhex(channel), retry_s=_CONNECT_S)


def _serve_all(
    links: Sequence[BlockingLink],
    files: Sequence[BlockingLink],
    reporter: Reporter,
    options: Options,
    credentials: Credentials,
) -> int:
    """Serve each model on its link, the first in this thread; end all when one ends."""
    lock, codes = ComputeLock(), list[int]()

    def run(model: int) -> None:
        try:
            client = FileClient(files[model]) if files else None
            codes.append(_import_and_serve(links[model], client, reporter, options, credentials, lock, model))
        finally:
            for other in links if len(links) > 1 else ():
                other.close()

    threads = [StartedThread(f"model {i}", partial(run, i)) for i in range(1, len(links))]
    run(0)
    for thread in threads:
        thread.join()
    return max(codes)


def _import_and_serve(
    link: BlockingLink,
    files: FileClient | None,
    reporter: Reporter,
    options: Options,
    credentials: Credentials,
    lock: ComputeLock,
    model: int,
) -> int:
    try:
        from daemons.worker import run_worker
    except ImportError as error:
        traceback.print_exc()
        advice = f"install torch, numpy, gguf and msgspec for {sys.executable}, or set groups.{options.group}.python"
        _send(link, Failed("start", options.group, f"import failed: {error}", advice, configuration=True))
        return EXIT_CONFIGURATION
    try:
        return run_worker(link, files, reporter, options, credentials, lock, model)
    except Exception as error:
        traceback.print_exc()
        advice = "see the daemon's log; report it if the same request fails again"
        details = traceback.format_exc()
        failed = Failed(reporter.phase_now, options.group, describe(error), advice, details=details)
        _send(link, failed)
        return EXIT_FAILED


def _send(link: BlockingLink, failed: Failed) -> None:
    """Send the reason for exiting if the link is up; stderr has it in any case."""
    with contextlib.suppress(LinkClosed, LocalProtocolError):
        link.send(failed)


def _die_with_parent(parent_pid: int) -> None:
    """End with the supervisor's main thread; exit now if it has ended."""
    if not end_with_parent(parent_pid):
        print(
            f"the supervisor (process {parent_pid}) is not the parent of this daemon: it ended, or the group's python "
            "is a wrapper that forks instead of calling exec",
            file=sys.stderr,
        )
        sys.exit(EXIT_CONFIGURATION)


def _exit_in_order_on_sigterm(links: Sequence[socket.socket], reporter: Reporter) -> None:
    def on_sigterm(_number: int, _frame: FrameType | None) -> None:
        if reporter.phase_now == "start":
            # Packages catch exceptions inside an import and retry: exit at once, nothing is held yet.
            os._exit(0)
        if reporter.phase_now in ("idle", "step"):
            for link in links:
                with contextlib.suppress(OSError):  # already closed: the loop that reads it is ending
                    link.shutdown(socket.SHUT_RD)  # the next receive, after this step, sees end of file
        else:
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)


def _terminate_self() -> None:
    """The supervisor closed the heartbeat: end as on SIGTERM, even in the middle of a load."""
    os.kill(os.getpid(), signal.SIGTERM)
