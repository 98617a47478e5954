"""The sans-I/O connection: any split of a stream gives the same frames, and both ends keep the order of messages."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.model.values import Dtype
from lucevisor.protocol.codec import encode
from lucevisor.protocol.connection import READ_BUFFER_BYTES, Connection
from lucevisor.protocol.errors import LocalProtocolError, RemoteProtocolError
from lucevisor.protocol.loading import ArenaPlan
from lucevisor.protocol.messages import MIB, Channel, Check, Failed, Heartbeat, LogLine, MessageKind, Role, Shutdown
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import Reset, Slice, Step, StepResult
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


def test_payload_memory_is_not_reused():
    connection = ready(Role.DAEMON)
    frame = b"".join(map(bytes, ready(Role.SUPERVISOR).send(Step(1, 0), payload=[b"a" * 1000])))
    connection.receive(frame)
    first = connection.events()[0].payload
    connection.receive(frame.replace(b"a" * 1000, b"b" * 1000))
    assert connection.events()[0].payload == b"b" * 1000
    assert first == b"a" * 1000
    first[0] = 0  # writable: a tensor may be made on it


def test_frames_before_the_damage_are_delivered_then_the_error_persists():
    connection = ready(Role.DAEMON)
    good = encode(Reset(1)) + encode(Reset(2))
    connection.receive(good + b"GET / HTTP/1.1\r\nHost: localhost:8080\r\n\r\n")
    assert [f.message.token for f in connection.events()] == [1, 2]
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="found b'GET '") as caught:
            connection.events()
        connection.receive(encode(Reset(3)))  # good bytes do not mend it
    assert f"byte {len(good)} " in caught.value.where
    assert "supervisor" in caught.value.where


def test_foreign_bytes_are_rejected_before_a_whole_header():
    connection = ready(Role.DAEMON)
    connection.receive(b"LVS")
    assert connection.events() == []
    connection = ready(Role.DAEMON)
    connection.receive(b"no")
    with pytest.raises(RemoteProtocolError):
        connection.events()


@pytest.mark.parametrize("kind", [MessageKind.STEP_RESULT, MessageKind.HELLO])
def test_a_rejected_header_allocates_nothing(kind):
    import struct
    from zlib import crc32

    head = struct.pack("<4sHBBQIII", b"LVSR", 1, kind, 0, 0, 2**32 - 1, 2**32 - 1, 0)
    connection = ready(Role.SUPERVISOR)
    tracemalloc.start()
    connection.receive(head + crc32(head).to_bytes(4, "little"))
    with pytest.raises(RemoteProtocolError):
        connection.events()
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("role", "channel", "state", "message"),
    [
        (Role.SUPERVISOR, Channel.LINK, LinkState.GREETING, StepResult(1, 0)),
        (Role.SUPERVISOR, Channel.LINK, LinkState.READY, Step(1, 0)),
        (Role.DAEMON, Channel.LINK, LinkState.CLOSING, Step(1, 0)),
        (Role.DAEMON, Channel.PULSE, LinkState.READY, Shutdown()),
        (Role.SUPERVISOR, Channel.LINK, LinkState.READY, Heartbeat(1, "idle", 0.0, 0, 0, 0, 0, [])),
        (Role.SUPERVISOR, Channel.PULSE, LinkState.READY, Failed("a", "b", "c", "d")),
    ],
)
def test_messages_out_of_order_or_on_the_wrong_channel_are_rejected(role, channel, state, message):
    connection = Connection(role, channel)
    connection.state = state
    connection.receive(encode(message))
    with pytest.raises(RemoteProtocolError, match=r"is not allowed in state|is sent by"):
        connection.events()
    sender = Connection(Role.DAEMON if role is Role.SUPERVISOR else Role.SUPERVISOR, channel)
    sender.state = state
    for send in (lambda: sender.send(message), lambda: sender.send_encoded(encode(message))):
        with pytest.raises(LocalProtocolError, match=r"is not allowed in state|is sent by"):
            send()
    assert sender.state is state


def test_sending_does_not_disturb_a_partly_received_frame():
    connection = ready(Role.SUPERVISOR)
    data = encode(StepResult(4, 0))
    connection.receive(data[:40])
    connection.send(Shutdown())
    connection.receive(data[40:])
    assert [f.message.step_id for f in connection.events()] == [4]
    assert connection.state is LinkState.CLOSING


def check_frame(n_arenas):
    return encode(Check([], 0, Dtype.FLOAT32, [ArenaPlan(i, 64, 1) for i in range(n_arenas)]))


def test_descriptors_go_to_the_frames_that_name_them():
    connection = ready(Role.DAEMON)
    two, one = check_frame(2), check_frame(1)
    connection.receive(encode(Reset(1)) + two[:50], [10, 11])
    connection.receive(two[50:] + one, [12])
    assert [f.fds for f in connection.events()] == [(), (10, 11), (12,)]


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


def test_sending_counts_descriptors():
    connection = ready(Role.SUPERVISOR)
    check = Check([], 0, Dtype.FLOAT32, [ArenaPlan(0, 64, 1)])
    with pytest.raises(LocalProtocolError, match="names 1 arenas, but 0 descriptors"):
        connection.send(check)
    with pytest.raises(LocalProtocolError, match="pass the message itself"):
        connection.send_encoded(encode(check))
    assert len(connection.send(check, n_fds=1)) == 1


def test_a_payload_is_sent_without_joining():
    rows = bytearray(b"x" * 100)
    head, *parts = ready(Role.SUPERVISOR).send(Step(1, 0, slices=[Slice(0, 0, [1], True)]), payload=[rows, b"", b"y"])
    assert [part.obj for part in parts] == [rows, b"y"]
    assert len(head) < 100


def test_unfinished_names_what_is_truncated():
    connection = Connection(Role.SUPERVISOR, Channel.PULSE)
    data = encode(LogLine("info", "loaded"))
    connection.receive(data[:7])
    assert connection.unfinished == "after 7 bytes of a header"
    connection.receive(data[7:-1])
    assert connection.unfinished == "inside a LOG_LINE frame"
