"""The state machine: who may send what when."""

import re

import pytest

from lucevisor.protocol.messages import MessageKind, Role, StreamKind
from lucevisor.protocol.states import TRANSITIONS, LinkState, legal, refusal


def test_crossing_messages_break_nothing():
    """What one end may send stays legal, and ends in the same state, whatever the other end sends meanwhile."""
    for state in TRANSITIONS:
        down, up = (legal(StreamKind.LINK, role)[state] for role in (Role.SUPERVISOR, Role.DAEMON))
        for first, after_first in down.items():
            for second, after_second in up.items():
                assert TRANSITIONS[after_first].get(second) == TRANSITIONS[after_second].get(first) is not None, (
                    state,
                    first,
                    second,
                )


@pytest.mark.parametrize(
    ("channel", "sender", "state", "kind", "text"),
    [
        (
            StreamKind.LINK,
            Role.SUPERVISOR,
            LinkState.GREETING,
            MessageKind.LOAD,
            "LOAD is not allowed in state greeting, where the sup",
        ),
        (StreamKind.LINK, Role.SUPERVISOR, LinkState.LOADING, MessageKind.STEP, "supervisor may send SHUTDOWN$"),
        (StreamKind.LINK, Role.DAEMON, LinkState.IDLE, MessageKind.HELLO, "HELLO is not allowed in state idle"),
        (
            StreamKind.LINK,
            Role.DAEMON,
            LinkState.READY,
            MessageKind.STEP,
            "STEP is sent by the supervisor on the link, not by the dae",
        ),
        (
            StreamKind.LINK,
            Role.DAEMON,
            LinkState.READY,
            MessageKind.HEARTBEAT,
            "sent by the daemon on the pulse, not by the daemon on",
        ),
        (
            StreamKind.PULSE,
            Role.SUPERVISOR,
            LinkState.READY,
            MessageKind.STEP,
            "on the link, not by the supervisor on the pulse",
        ),
    ],
)
def test_refusals_give_the_reason(channel, sender, state, kind, text):
    assert kind not in legal(channel, sender)[state]
    assert re.search(text, refusal(channel, sender, state, kind))
