"""Who may send which message on which channel, and in what order: one table, used by both ends.

Everything about the order of messages is in this file, and this file does not know which end it runs on.  Invariant:
a link's state changes only through :data:`TRANSITIONS`, by a message sent or received; and what one end may send stays
legal while a message of the other end is under way, so crossing messages break nothing.
"""

from __future__ import annotations

from enum import Enum, StrEnum

from lucevisor.protocol.messages import Kind


class Role(StrEnum):
    """The two ends."""

    SUPERVISOR = "supervisor"
    DAEMON = "daemon"


class Channel(StrEnum):
    """The two sockets of a daemon."""

    LINK = "link"
    PULSE = "pulse"


class LinkState(Enum):
    """Where the conversation stands.  A pulse is in READY always."""

    GREETING = "greeting"  # the daemon has not said hello
    IDLE = "idle"  # interpreter and torch are there, no weights: a spare stays here
    LOADING = "loading"  # Load was sent
    READY = "ready"  # steps may be sent
    CLOSING = "closing"  # Shutdown was sent; what the daemon still says is read


SENDERS: dict[Kind, tuple[Channel, Role]] = {
    Kind.HELLO: (Channel.LINK, Role.DAEMON),
    Kind.LOAD: (Channel.LINK, Role.SUPERVISOR),
    Kind.LOADED: (Channel.LINK, Role.DAEMON),
    Kind.STEP: (Channel.LINK, Role.SUPERVISOR),
    Kind.STEP_RESULT: (Channel.LINK, Role.DAEMON),
    Kind.FAILED: (Channel.LINK, Role.DAEMON),
    Kind.RESET: (Channel.LINK, Role.SUPERVISOR),
    Kind.CHECK: (Channel.LINK, Role.SUPERVISOR),
    Kind.CHECKED: (Channel.LINK, Role.DAEMON),
    Kind.SHUTDOWN: (Channel.LINK, Role.SUPERVISOR),
    Kind.SAVE: (Channel.LINK, Role.SUPERVISOR),
    Kind.SAVED: (Channel.LINK, Role.DAEMON),
    Kind.RESTORE: (Channel.LINK, Role.SUPERVISOR),
    Kind.RESTORED: (Channel.LINK, Role.DAEMON),
    Kind.HEARTBEAT: (Channel.PULSE, Role.DAEMON),
    Kind.PROGRESS: (Channel.PULSE, Role.DAEMON),
    Kind.LOG_LINE: (Channel.PULSE, Role.DAEMON),
}

INITIAL: dict[Channel, LinkState] = {Channel.LINK: LinkState.GREETING, Channel.PULSE: LinkState.READY}

TRANSITIONS: dict[LinkState, dict[Kind, LinkState]] = {
    LinkState.GREETING: {
        Kind.HELLO: LinkState.IDLE,
        Kind.FAILED: LinkState.GREETING,  # torch cannot be imported, a device is not there
        Kind.SHUTDOWN: LinkState.CLOSING,
    },
    LinkState.IDLE: {
        Kind.LOAD: LinkState.LOADING,
        Kind.CHECK: LinkState.IDLE,
        Kind.CHECKED: LinkState.IDLE,
        Kind.FAILED: LinkState.IDLE,
        Kind.SHUTDOWN: LinkState.CLOSING,
    },
    LinkState.LOADING: {
        Kind.LOADED: LinkState.READY,
        Kind.CHECKED: LinkState.LOADING,  # answer to a Check sent before the Load
        Kind.FAILED: LinkState.LOADING,  # a process loads once: the next Load goes to the next process
        Kind.SHUTDOWN: LinkState.CLOSING,
    },
    LinkState.READY: {
        Kind.STEP: LinkState.READY,
        Kind.STEP_RESULT: LinkState.READY,
        Kind.RESET: LinkState.READY,
        Kind.CHECK: LinkState.READY,
        Kind.CHECKED: LinkState.READY,
        Kind.SAVE: LinkState.READY,
        Kind.SAVED: LinkState.READY,
        Kind.RESTORE: LinkState.READY,
        Kind.RESTORED: LinkState.READY,
        Kind.FAILED: LinkState.READY,
        Kind.SHUTDOWN: LinkState.CLOSING,
        Kind.HEARTBEAT: LinkState.READY,
        Kind.PROGRESS: LinkState.READY,
        Kind.LOG_LINE: LinkState.READY,
    },
    LinkState.CLOSING: {
        Kind.HELLO: LinkState.CLOSING,  # was under way when Shutdown was sent; so were the others
        Kind.LOADED: LinkState.CLOSING,
        Kind.STEP_RESULT: LinkState.CLOSING,
        Kind.FAILED: LinkState.CLOSING,
        Kind.CHECKED: LinkState.CLOSING,
        Kind.SAVED: LinkState.CLOSING,
        Kind.RESTORED: LinkState.CLOSING,
        Kind.SHUTDOWN: LinkState.CLOSING,  # a second stop
    },
}


def legal(channel: Channel, sender: Role) -> dict[LinkState, dict[Kind, LinkState]]:
    """The part of :data:`TRANSITIONS` that ``sender`` makes on ``channel``."""
    return {
        state: {kind: after for kind, after in row.items() if SENDERS[kind] == (channel, sender)}
        for state, row in TRANSITIONS.items()
    }


def refusal(channel: Channel, sender: Role, state: LinkState, kind: Kind) -> str:
    """Why ``sender`` must not send ``kind`` on ``channel`` in this state."""
    right_channel, right_sender = SENDERS[kind]
    if (right_channel, right_sender) != (channel, sender):
        return f"{kind.name} is sent by the {right_sender} on the {right_channel}, not by the {sender} on the {channel}"
    allowed = ", ".join(k.name for k in legal(channel, sender)[state]) or "nothing"
    return f"{kind.name} does not fit the state {state.value}, where the {sender} may send {allowed}"
