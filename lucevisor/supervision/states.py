"""The states of a backend group and the only moves between them.

Invariant: a move that `TRANSITIONS` does not list never happens; the
diagram of docs/states.md is printed from the same table (`python -m lucevisor.app.states_page`).
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """State of a backend group. Only in the states of `WITH_CHILD`, and in FAILED when quarantined, is there a
    process.
    """

    STOPPED = "stopped"  # nothing runs, and no start is requested
    STARTING = "starting"  # a child was spawned; it imports torch and has not sent hello
    LOADING = "loading"  # it sent hello and loads its layers
    READY = "ready"  # it runs steps
    DRAINING = "draining"  # it finishes the steps it has and gets no new ones
    STOPPING = "stopping"  # it was told to exit, or signalled
    BACKOFF = "backoff"  # it exited; the next start is delayed
    FAILED = "failed"  # given up until a long pause is over or a restart is requested


WITH_CHILD = frozenset({State.STARTING, State.LOADING, State.READY, State.DRAINING, State.STOPPING})

TRANSITIONS: dict[State, dict[State, str]] = {
    State.STOPPED: {
        State.STARTING: "start or restart requested",
    },
    State.STARTING: {
        State.LOADING: "hello",
        State.STOPPING: "stop or restart requested; hello late or refused; link closed",
        State.BACKOFF: "exited",
        State.FAILED: "cannot spawn; configuration error; restart limit",
    },
    State.LOADING: {
        State.READY: "loaded",
        State.STOPPING: "stop or restart requested; load stalled or failed; pulse missed; link closed",
        State.BACKOFF: "exited",
        State.FAILED: "exited with a configuration error; restart limit",
    },
    State.READY: {
        State.DRAINING: "stop or restart requested",
        State.STOPPING: "stop or restart requested at once; pulse missed; step or reset overdue; failed; link closed",
        State.BACKOFF: "exited",
        State.FAILED: "exited with a configuration error; restart limit",
    },
    State.DRAINING: {
        State.STOPPING: "drained; drain deadline; pulse missed; step or reset overdue; failed; link closed",
        State.STOPPED: "exited, stop requested",
        State.STARTING: "exited, restart requested",
    },
    State.STOPPING: {
        State.STOPPED: "exited, stop requested",
        State.STARTING: "exited, restart requested",
        State.BACKOFF: "exited after a failure",
        State.FAILED: "configuration error; restart limit; does not die (quarantine)",
    },
    State.BACKOFF: {
        State.STARTING: "backoff over; restart requested",
        State.STOPPED: "stop requested",
    },
    State.FAILED: {
        State.STARTING: "pause over; restart requested",
        State.STOPPED: "stop requested",
    },
}
