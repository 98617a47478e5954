"""Callbacks to the owner of a group: it provides the load to send, and is notified of every change.

Knows nothing of processes. Invariant: callbacks are called from the event loop, one at a time, and must not block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from lucevisor.protocol.frames import Frame
from lucevisor.protocol.loading import Hello, Load, Loaded
from lucevisor.protocol.messages import Heartbeat, Progress
from lucevisor.protocol.transport import Link
from lucevisor.protocol.validation import MAX_INTEGER, AskedStep
from lucevisor.supervision.states import State


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A Load message and the descriptors of its arenas, in the same order. The caller keeps the descriptors, and may
    close them after the send. `vocabulary`: ids that the daemon may name.
    """

    load: Load
    fds: Sequence[int] = ()
    vocabulary: int = MAX_INTEGER


def _ignore(*_: object) -> None:
    """Do nothing."""


def _unasked(*_: object) -> None:
    """Know of no step."""


def _accept(*_: object) -> str:
    """Accept whatever was loaded."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The first argument of each callback is the group's name.

    `make_load(group, hello)` returns what to load and may wait for other groups; an exception ends the start as a
    configuration error. `check_loaded` returns why what was loaded must not be used, or "".
    `on_ready` hands the link over for sending; `on_frame` gets every frame from then on. `asked(group, stage, step_id)`
    returns a step that the stage has yet to answer, for the check of its answer.
    `on_lost` comes once after each `on_ready`, as soon as the link is unusable: the process may still be exiting.
    `on_draining(group, child)`: send nothing new, finish, then call `drained(child)`; None: there is never anything to
    wait for. A callback that raises is reported to the loop's exception handler; the others still run.
    """

    make_load: Callable[[str, Hello], Awaitable[LoadOrder]]
    check_loaded: Callable[[str, Loaded], str] = _accept
    on_ready: Callable[[str, Link, Hello, Loaded], None] = _ignore
    on_lost: Callable[[str, str], None] = _ignore
    on_frame: Callable[[str, Frame], None] = _ignore
    asked: Callable[[str, int, int], AskedStep | None] = _unasked
    on_state: Callable[[str, State, str], None] = _ignore
    on_draining: Callable[[str, int], None] | None = None
    on_heartbeat: Callable[[str, Heartbeat], None] = _ignore
    on_progress: Callable[[str, Progress], None] = _ignore
