"""The sans-I/O connection: any split of a stream gives the same frames, and both ends keep the order of messages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.model.values import Dtype
from lucevisor.protocol.connection import READ_BUFFER_BYTES, Connection
from lucevisor.protocol.errors import LocalProtocolError, RemoteProtocolError
from lucevisor.protocol.frames import encode
from lucevisor.protocol.loading import ArenaPlan
from lucevisor.protocol.messages import Check, Failed, Heartbeat, Role, Shutdown, StreamKind
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import Reset, Step, StepResult
from tests.protocol.message_strategies import streams


def connection_for(stream):
    connection = Connection(stream.receiver, stream.channel, "link of left")
    connection.state = stream.state
    return connection


def ready(role):
    connection = Connection(role)
    connection.state = LinkState.READY
    return connection


def seen(frames):
    return [(f.kind, f.request_id, f.flags, f.message, bytes(f.payload), f.fds) for f in frames]


def sent(stream):
    return [(f.kind, f.request_id, f.flags, f.message, f.payload, f.fds) for f in stream.frames]


def pieces(stream, sizes):
    """(bytes, descriptors) of the stream cut into pieces; descriptors come with the first byte of their frame."""
    starts, position = {}, 0
    for frame in stream.frames:
        starts[position] = frame.fds
        position += len(frame.data)
    data, start = stream.data, 0
    for size in [*sizes, len(data)]:
        stop = min(start + size, len(data))
        if stop > start:
            yield data[start:stop], [fd for at, fds in starts.items() if start <= at < stop for fd in fds]
        start = stop


@settings(max_examples=150)
@given(stream=streams(), sizes=st.lists(st.integers(1, 80), max_size=60))
def test_any_split_gives_the_same_frames(stream, sizes):
    connection = connection_for(stream)
    found = []
    for data, fds in pieces(stream, sizes):
        connection.receive(data, fds)
        found += connection.events()
    assert seen(found) == sent(stream)
    assert connection.unfinished == ""
    assert connection.take_descriptors() == []


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 100, 30_000, READ_BUFFER_BYTES - 40, READ_BUFFER_BYTES, 200_000]), max_size=8
    ),
    texts=st.lists(st.sampled_from([0, 10, 65_400, 65_536, 65_600, 300_000]), min_size=8, max_size=8),
    reads=st.lists(st.one_of(st.integers(1, 40), st.integers(10_000, 100_000)), max_size=10).map(
        lambda r: [*r, 70_000]
    ),
)
def test_receiving_into_the_buffers(lengths, texts, reads):
    """Frames around the size of the read buffer, read in pieces straight into where they belong."""
    frames, data = [], bytearray()
    for i, (length, text) in enumerate(zip(lengths, texts, strict=False)):
        payload = bytes([i + 1]) * (length // 4 * 4)
        segments = [("x" * text, [length // 4])]
        frames.append((segments, payload))
        data += encode(StepResult(i, 0, segments=segments), i, payload_bytes=len(payload)) + payload
    connection = ready(Role.SUPERVISOR)
    found, position, turn = [], 0, 0
    while position < len(data):
        room = connection.buffer()
        n = min(len(room), reads[turn % len(reads)], len(data) - position)
        assert n > 0
        room[:n] = data[position : position + n]
        connection.received(n)
        found += connection.events()
        position, turn = position + n, turn + 1
    assert [(f.message.segments, bytes(f.payload)) for f in found] == frames


@pytest.mark.parametrize(
    ("role", "channel", "state", "message", "text"),
    [
        (
            Role.SUPERVISOR,
            StreamKind.LINK,
            LinkState.GREETING,
            StepResult(1, 0),
            "STEP_RESULT is not allowed in state greet",
        ),
        (
            Role.SUPERVISOR,
            StreamKind.LINK,
            LinkState.READY,
            Step(1, 0),
            "sent by the supervisor on the link, not by the dae",
        ),
        (Role.DAEMON, StreamKind.LINK, LinkState.CLOSING, Step(1, 0), "STEP is not allowed in state closing"),
        (Role.DAEMON, StreamKind.LINK, LinkState.LOADING, Step(1, 0), "supervisor may send SHUTDOWN"),
        (
            Role.DAEMON,
            StreamKind.HEARTBEAT,
            LinkState.READY,
            Shutdown(),
            "on the link, not by the supervisor on the heartbeat",
        ),
        (
            Role.SUPERVISOR,
            StreamKind.LINK,
            LinkState.READY,
            Heartbeat(1, "idle", 0.0, 0, 0, 0, 0, []),
            "sent by the daemon on the heartbeat, not by the daemon on the link",
        ),
        (
            Role.SUPERVISOR,
            StreamKind.HEARTBEAT,
            LinkState.READY,
            Failed("a", "b", "c", "d"),
            "sent by the daemon on the link",
        ),
    ],
)
def test_messages_out_of_order_or_on_the_wrong_channel_are_rejected(role, channel, state, message, text):
    connection = Connection(role, channel)
    connection.state = state
    connection.receive(encode(message))
    with pytest.raises(RemoteProtocolError, match=text):
        connection.events()
    sender = Connection(Role.DAEMON if role is Role.SUPERVISOR else Role.SUPERVISOR, channel)
    sender.state = state
    for send in (lambda: sender.send(message), lambda: sender.send(encode(message))):
        with pytest.raises(LocalProtocolError, match=text):
            send()
    assert sender.state is state


def check_frame(n_arenas):
    return encode(Check([], 0, Dtype.FLOAT32, [ArenaPlan(i, 64, 1) for i in range(n_arenas)]))


@pytest.mark.parametrize(
    ("data", "fds", "text"),
    [
        (check_frame(2), [10], "names 2 arenas, 1 descriptors arrived"),
        (check_frame(1), [10, 11], "1 descriptors arrived with a frame that takes none"),
        (encode(Reset(1)), [10], "1 descriptors arrived with a frame that takes none"),
    ],
)
def test_too_few_and_too_many_descriptors_are_rejected_and_returned(data, fds, text):
    connection = ready(Role.DAEMON)
    connection.receive(data, fds)
    taken = []
    with pytest.raises(RemoteProtocolError, match=text):  # noqa: PT012 - the frame before the error holds some of them
        while True:
            taken += [fd for frame in connection.events() for fd in frame.fds]
    assert taken + connection.take_descriptors() == fds
