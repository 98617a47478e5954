"""Whatever comes in: good frames before the damage, then an error; never a crash, never memory beyond the limits."""

import asyncio
import contextlib
import os
import random
import socket
from zlib import crc32

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lucevisor.protocol.connection import Connection
from lucevisor.protocol.errors import LinkClosed, RemoteProtocolError
from lucevisor.protocol.frames import CHECKED_BYTES, HEADER_BYTES
from lucevisor.protocol.messages import MESSAGES
from lucevisor.protocol.transport import BlockingLink, Link
from tests.fuzz.steady import mutated
from tests.protocol.message_strategies import streams


def collect(connection):
    """(frames, error) of everything that was received."""
    frames = []
    while True:
        try:
            more = connection.events()
        except RemoteProtocolError as error:
            return frames, error
        if not more:
            return frames, None
        frames += more


@st.composite
def damages(draw):
    """(kind of damage, stream, damaged bytes, first damaged position)."""
    stream = draw(streams())
    data = stream.data
    at = draw(st.integers(0, len(data) - 1))
    how = draw(st.sampled_from(["flip", "insert", "delete", "truncate", "overwrite"]))
    if how == "flip":
        damaged = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
    elif how == "insert":
        damaged = data[:at] + draw(st.binary(min_size=1, max_size=40)) + data[at:]
    elif how == "delete":
        damaged = (
            data[:at] + data[at + draw(st.integers(1, HEADER_BYTES - 1)) :]
        )  # less than a frame: a lost whole one leaves no trace
    elif how == "truncate":
        damaged = data[:at]
    else:
        new = draw(st.binary(min_size=1, max_size=40))
        damaged = data[:at] + new + data[at + len(new) :]
    at = next((i for i, (a, b) in enumerate(zip(data, damaged, strict=False)) if a != b), min(len(data), len(damaged)))
    return how, stream, damaged, at


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(damage=damages(), size=st.integers(1, 200))
def test_any_damage_gives_the_frames_before_it_and_no_wrong_one_after(damage, size):
    how, stream, damaged, at = damage
    connection = Connection(stream.receiver, stream.channel)
    connection.state = stream.state
    fds, position = (
        {},
        0,
    )  # descriptors come with the first byte of their frame; those after the damage are lost with it
    for frame in stream.frames:
        fds[position] = frame.fds if position < at else ()
        position += len(frame.data)
    for start in range(0, len(damaged), size):
        here = [fd for place, some in fds.items() if start <= place < start + size for fd in some]
        connection.receive(damaged[start : start + size], here)
    frames, error = collect(connection)
    found = [(f.kind, f.request_id, f.message, bytes(f.payload)) for f in frames]

    position = n_before = 0
    for frame in stream.frames:
        position += len(frame.data)
        n_before += position <= at
    expected = [(f.kind, f.request_id, f.message, f.payload) for f in stream.frames]
    assert found[:n_before] == expected[:n_before]
    if damaged == stream.data:
        assert found == expected
        return
    # After the damage a frame may come only whole and true, but for its payload, which has no check.
    assert [f[:3] for f in found[n_before:]] == [f[:3] for f in expected[n_before : len(found)]]
    if how == "truncate":
        assert error is None  # nothing wrong was said yet
    elif n_before < len(stream.frames):
        hurt = stream.frames[n_before]
        metadata_starts = sum(len(f.data) for f in stream.frames[:n_before]) + HEADER_BYTES
        metadata_ends = metadata_starts - HEADER_BYTES + len(hurt.data) - len(hurt.payload)
        if at < metadata_starts <= len(damaged) or metadata_starts <= at < metadata_ends <= len(damaged):
            assert error is not None


# ---- damage under right checks

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
WRONG = [None, True, -1, 0, 2**63, -(2**63), 2**64 - 1, float("nan"), "", "x" * 300, b"\xff", [], {}, [[]] * 9]


def damaged_value(rng, metadata):
    """The same record with one value of it another, deep or shallow."""
    value = place = msgspec.msgpack.decode(metadata)
    while isinstance(place, list | dict) and place:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if not isinstance(place[key], list | dict) or not place[key] or rng.random() < 0.3:
            place[key] = rng.choice([*WRONG, [place[key]], rng.randrange(100)])
            break
        place = place[key]
    return msgspec.msgpack.encode(value)


def damaged_frame(rng, data):
    header, metadata = bytearray(data[:HEADER_BYTES]), data[HEADER_BYTES:]
    n_metadata = int.from_bytes(header[16:20], "little")
    metadata, payload = metadata[:n_metadata], metadata[n_metadata:]
    match rng.randrange(4):
        case 0 | 1 as how:
            metadata = mutated(rng, metadata) if how else damaged_value(rng, metadata)
            header[16:20] = len(metadata).to_bytes(4, "little")
            header[24:28] = crc32(metadata).to_bytes(4, "little")
        case 2:
            start, length = rng.choice(((4, 2), (6, 1), (7, 1), (8, 8), (16, 4), (20, 4), (24, 4)))
            header[start : start + length] = (rng.choice(NUMBERS) % 256**length).to_bytes(length, "little")
        case _:
            payload = mutated(rng, payload) if payload else rng.randbytes(rng.randrange(40))
    header[CHECKED_BYTES:] = crc32(header[:CHECKED_BYTES]).to_bytes(4, "little")
    return bytes(header) + metadata + payload


@st.composite
def damaged_streams(draw):
    """(a stream, its bytes after damage to a frame or to the order of frames, how many descriptors come along)."""
    stream, rng = draw(streams()), random.Random(draw(st.integers(0, 2**32)))
    assume(stream.frames)
    frames, n_fds = [frame.data for frame in stream.frames], sum(len(frame.fds) for frame in stream.frames)
    match rng.randrange(4):
        case 0:
            rng.shuffle(frames)
        case 1:
            frames.insert(0, rng.choice(frames))
        case 2:
            n_fds = max(0, n_fds + rng.randrange(-2, 3))
    at = rng.randrange(len(frames))
    frames[at] = damaged_frame(rng, frames[at])
    return stream, b"".join(frames), min(n_fds, 8)


@settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow])
@given(damage=damaged_streams(), size=st.sampled_from([7, 32, 33, 500, 100_000]))
def test_damage_under_right_checks_gives_typed_messages_and_one_error(damage, size):
    stream, data, n_fds = damage
    connection = Connection(stream.receiver, stream.channel)
    connection.state = stream.state
    for start in range(0, len(data), size):
        connection.receive(data[start : start + size], range(1000, 1000 + n_fds) if start == 0 else ())
    frames, error = collect(connection)
    assert all(type(frame.message) is MESSAGES[frame.kind].record for frame in frames)
    if error is not None:
        assert error.what
        assert error.where
        assert error.advice
        assert len(str(error)) < 2000
        with pytest.raises(RemoteProtocolError):
            connection.events()


def drop(frame):
    for fd in frame.fds:
        os.close(fd)


def read_blocking(sock, stream):
    link = BlockingLink(sock, role=stream.receiver, stream=stream.channel)
    link._connection.state = stream.state
    with contextlib.closing(link), contextlib.suppress(RemoteProtocolError):
        while (frame := link.receive()) is not None:
            drop(frame)


def read_asyncio(sock, stream):
    async def main():
        ended = asyncio.get_running_loop().create_future()
        link = Link(sock, drop, ended.set_result, role=stream.receiver, stream=stream.channel)
        link._connection.state = stream.state
        assert isinstance(await asyncio.wait_for(ended, 60), RemoteProtocolError | LinkClosed)
        link.close()

    asyncio.run(main())


@pytest.mark.parametrize("read", [read_blocking, read_asyncio])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damage=damaged_streams())
def test_links_end_with_a_reason_and_keep_no_descriptor(read, damage):
    stream, data, n_fds = damage
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(n_fds)]
    ours.setblocking(False)
    socket.send_fds(ours, [data], fds) if fds else ours.send(data)  # what is longer than a buffer is cut off
    for fd in (*fds, ours.detach()):
        os.close(fd)
    read(theirs, stream)
    assert len(os.listdir("/proc/self/fd")) <= before
