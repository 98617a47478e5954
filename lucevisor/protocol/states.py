"""The protocol's state machine: who may send which message, on which channel, in which order.

Both ends use the same tables; nothing here depends on which end it runs on.  Invariants: a link's state changes only
through :data:`TRANSITIONS`, by a message sent or received; what one end may send stays legal while the other end's
message is in transit, so messages may cross.
"""

from __future__ import annotations

from enum import Enum, StrEnum

from lucevisor.protocol.messages import MessageKind


class Role(StrEnum):
    """The two ends."""

    SUPERVISOR = "supervisor"
    DAEMON = "daemon"


class Channel(StrEnum):
    """The two sockets of a daemon."""

    LINK = "link"
    PULSE = "pulse"


class LinkState(Enum):
    """State of a link.  A pulse is always READY."""

    GREETING = "greeting"  # no Hello yet
    IDLE = "idle"  # interpreter and torch are up, no weights: a spare stays here
    LOADING = "loading"  # Load was sent
    READY = "ready"  # steps may be sent
    CLOSING = "closing"  # Shutdown was sent; what the daemon still sends is read


SENDERS: dict[MessageKind, tuple[Channel, Role]] = {
    MessageKind.HELLO: (Channel.LINK, Role.DAEMON),
    MessageKind.LOAD: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.LOADED: (Channel.LINK, Role.DAEMON),
    MessageKind.REHEARSE: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.REHEARSED: (Channel.LINK, Role.DAEMON),
    MessageKind.STEP: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.DRAFT_STEP: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.MASKS: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.SCORE_WINDOW: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.WINDOW_SCORES: (Channel.LINK, Role.DAEMON),
    MessageKind.STEP_RESULT: (Channel.LINK, Role.DAEMON),
    MessageKind.FAILED: (Channel.LINK, Role.DAEMON),
    MessageKind.RECALL: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.RECALLED: (Channel.LINK, Role.DAEMON),
    MessageKind.RESET: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.CHECK: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.CHECKED: (Channel.LINK, Role.DAEMON),
    MessageKind.SHUTDOWN: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.SAVE: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.SAVED: (Channel.LINK, Role.DAEMON),
    MessageKind.RESTORE: (Channel.LINK, Role.SUPERVISOR),
    MessageKind.RESTORED: (Channel.LINK, Role.DAEMON),
    MessageKind.RESET_DONE: (Channel.LINK, Role.DAEMON),
    MessageKind.TRANSFER_FAILED: (Channel.LINK, Role.DAEMON),
    MessageKind.HEARTBEAT: (Channel.PULSE, Role.DAEMON),
    MessageKind.PROGRESS: (Channel.PULSE, Role.DAEMON),
    MessageKind.LOG_LINE: (Channel.PULSE, Role.DAEMON),
}

INITIAL: dict[Channel, LinkState] = {Channel.LINK: LinkState.GREETING, Channel.PULSE: LinkState.READY}

TRANSITIONS: dict[LinkState, dict[MessageKind, LinkState]] = {
    LinkState.GREETING: {
        MessageKind.HELLO: LinkState.IDLE,
        MessageKind.FAILED: LinkState.GREETING,  # torch cannot be imported, a device is missing
        MessageKind.SHUTDOWN: LinkState.CLOSING,
    },
    LinkState.IDLE: {
        MessageKind.LOAD: LinkState.LOADING,
        MessageKind.REHEARSE: LinkState.IDLE,
        MessageKind.REHEARSED: LinkState.IDLE,
        MessageKind.CHECK: LinkState.IDLE,
        MessageKind.CHECKED: LinkState.IDLE,
        MessageKind.FAILED: LinkState.IDLE,
        MessageKind.SHUTDOWN: LinkState.CLOSING,
    },
    LinkState.LOADING: {
        MessageKind.LOADED: LinkState.READY,
        MessageKind.REHEARSED: LinkState.LOADING,  # answer to a Rehearse sent before the Load
        MessageKind.CHECKED: LinkState.LOADING,  # answer to a Check sent before the Load
        MessageKind.FAILED: LinkState.LOADING,  # a process loads once: the next Load goes to the next process
        MessageKind.SHUTDOWN: LinkState.CLOSING,
    },
    LinkState.READY: {
        MessageKind.STEP: LinkState.READY,
        MessageKind.DRAFT_STEP: LinkState.READY,
        MessageKind.MASKS: LinkState.READY,
        MessageKind.SCORE_WINDOW: LinkState.READY,
        MessageKind.WINDOW_SCORES: LinkState.READY,
        MessageKind.STEP_RESULT: LinkState.READY,
        MessageKind.RECALL: LinkState.READY,
        MessageKind.RECALLED: LinkState.READY,
        MessageKind.RESET: LinkState.READY,
        MessageKind.RESET_DONE: LinkState.READY,
        MessageKind.CHECK: LinkState.READY,
        MessageKind.CHECKED: LinkState.READY,
        MessageKind.SAVE: LinkState.READY,
        MessageKind.SAVED: LinkState.READY,
        MessageKind.RESTORE: LinkState.READY,
        MessageKind.RESTORED: LinkState.READY,
        MessageKind.TRANSFER_FAILED: LinkState.READY,
        MessageKind.FAILED: LinkState.READY,
        MessageKind.SHUTDOWN: LinkState.CLOSING,
        MessageKind.HEARTBEAT: LinkState.READY,
        MessageKind.PROGRESS: LinkState.READY,
        MessageKind.LOG_LINE: LinkState.READY,
    },
    LinkState.CLOSING: {
        MessageKind.HELLO: LinkState.CLOSING,  # was in transit when Shutdown was sent; so were the others
        MessageKind.LOADED: LinkState.CLOSING,
        MessageKind.REHEARSED: LinkState.CLOSING,
        MessageKind.STEP_RESULT: LinkState.CLOSING,
        MessageKind.WINDOW_SCORES: LinkState.CLOSING,
        MessageKind.RECALLED: LinkState.CLOSING,
        MessageKind.RESET_DONE: LinkState.CLOSING,
        MessageKind.FAILED: LinkState.CLOSING,
        MessageKind.CHECKED: LinkState.CLOSING,
        MessageKind.SAVED: LinkState.CLOSING,
        MessageKind.RESTORED: LinkState.CLOSING,
        MessageKind.TRANSFER_FAILED: LinkState.CLOSING,
        MessageKind.SHUTDOWN: LinkState.CLOSING,  # a second stop
    },
}


def legal(channel: Channel, sender: Role) -> dict[LinkState, dict[MessageKind, LinkState]]:
    """The part of :data:`TRANSITIONS` that ``sender`` drives on ``channel``."""
    return {
        state: {kind: after for kind, after in row.items() if SENDERS[kind] == (channel, sender)}
        for state, row in TRANSITIONS.items()
    }


def refusal(channel: Channel, sender: Role, state: LinkState, kind: MessageKind) -> str:
    """Why ``sender`` must not send ``kind`` on ``channel`` in this state."""
    right_channel, right_sender = SENDERS[kind]
    if (right_channel, right_sender) != (channel, sender):
        return f"{kind.name} is sent by the {right_sender} on the {right_channel}, not by the {sender} on the {channel}"
    allowed = ", ".join(k.name for k in legal(channel, sender)[state]) or "nothing"
    return f"{kind.name} is not allowed in state {state.value}, where the {sender} may send {allowed}"
