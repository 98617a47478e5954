"""The protocol's state machine: who may send which message, on which stream, in which order, for both ends.

Invariants: a link's state changes only through :data:`TRANSITIONS`; what one end may send stays legal while the other
end's message is in transit, so messages may cross."""

from __future__ import annotations

from enum import Enum

from lucevisor.protocol.messages import MESSAGES, MessageKind, Role, StreamKind


class LinkState(Enum):
    """State of a link.  A heartbeat, and a connection for rows or files, is always READY."""

    GREETING = "greeting"  # no Hello yet
    IDLE = "idle"  # interpreter and torch are up, no weights: a spare stays here
    LOADING = "loading"  # Load was sent
    READY = "ready"  # steps may be sent
    UNLOADING = "unloading"  # Unload was sent
    CLOSING = "closing"  # Shutdown was sent; what the daemon still sends is read


INITIAL: dict[StreamKind, LinkState] = {
    StreamKind.LINK: LinkState.GREETING,
    StreamKind.HEARTBEAT: LinkState.READY,
    StreamKind.ROWS: LinkState.READY,
    StreamKind.FILES: LinkState.READY,
}

_BEFORE_READY = {MessageKind.HELLO, MessageKind.LOAD, MessageKind.LOADED, MessageKind.UNLOADED}

TRANSITIONS: dict[LinkState, dict[MessageKind, LinkState]] = {
    LinkState.GREETING: {
        MessageKind.HELLO: LinkState.IDLE,
        MessageKind.FAILED: LinkState.GREETING,  # torch cannot be imported, a device is missing
        MessageKind.SHUTDOWN: LinkState.CLOSING,
    },
    LinkState.IDLE: {
        MessageKind.LOAD: LinkState.LOADING,
        MessageKind.UNLOAD: LinkState.UNLOADING,  # of weights that are parked
        MessageKind.CHECK: LinkState.IDLE,
        MessageKind.CHECKED: LinkState.IDLE,
        MessageKind.FAILED: LinkState.IDLE,
        MessageKind.SHUTDOWN: LinkState.CLOSING,
    },
    LinkState.LOADING: {
        MessageKind.LOADED: LinkState.READY,
        MessageKind.CHECKED: LinkState.LOADING,  # answer to a Check sent before the Load
        MessageKind.FAILED: LinkState.LOADING,  # the next Load goes to the next process
        MessageKind.UNLOADED: LinkState.IDLE,  # it failed, and the process serves other models
        MessageKind.SHUTDOWN: LinkState.CLOSING,
    },
    LinkState.READY: {kind: LinkState.READY for kind in MESSAGES if kind not in _BEFORE_READY}
    | {MessageKind.SHUTDOWN: LinkState.CLOSING, MessageKind.UNLOAD: LinkState.UNLOADING},
    LinkState.UNLOADING: {  # answers were in transit when Unload was sent
        kind: LinkState.UNLOADING
        for kind, message in MESSAGES.items()
        if kind not in _BEFORE_READY and message.stream is StreamKind.LINK and message.sender is Role.DAEMON
    }
    | {MessageKind.UNLOADED: LinkState.IDLE, MessageKind.SHUTDOWN: LinkState.CLOSING},
    LinkState.CLOSING: {  # answers were in transit when Shutdown was sent, which may be sent again
        kind: LinkState.CLOSING
        for kind, message in MESSAGES.items()
        if kind is MessageKind.SHUTDOWN or (message.stream is StreamKind.LINK and message.sender is Role.DAEMON)
    },
}


def legal(stream: StreamKind, sender: Role) -> dict[LinkState, dict[MessageKind, LinkState]]:
    """Return the part of :data:`TRANSITIONS` that ``sender`` drives on ``stream``; both ends of one for rows are
    daemons."""
    sender = Role.DAEMON if stream is StreamKind.ROWS else sender
    return {
        state: {kind: after for kind, after in row.items() if _sender(kind) == (stream, sender)}
        for state, row in TRANSITIONS.items()
    }


def refusal(stream: StreamKind, sender: Role, state: LinkState, kind: MessageKind) -> str:
    """Return why ``sender`` must not send ``kind`` on ``stream`` in this state."""
    right_stream, right_sender = _sender(kind)
    if (right_stream, right_sender) != (stream, sender):
        return f"{kind.name} is sent by the {right_sender} on the {right_stream}, not by the {sender} on the {stream}"
    allowed = ", ".join(k.name for k in legal(stream, sender)[state]) or "nothing"
    return f"{kind.name} is not allowed in state {state.value}, where the {sender} may send {allowed}"


def _sender(kind: MessageKind) -> tuple[StreamKind, Role]:
    return MESSAGES[kind].stream, MESSAGES[kind].sender
