"""Frames that a broken daemon might send: good ones before the damage, then a RemoteProtocolError, nothing else.

Damage is done to bytes, and under checks that were made right again, so that the typed decode meets it too.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import socket
import types
import typing
from enum import Enum
from functools import cache
from zlib import crc32

import msgspec
import pytest

from lucevisor.protocol.codec import encode, n_descriptors
from lucevisor.protocol.connection import Connection
from lucevisor.protocol.errors import LinkClosed, ProtocolError, RemoteProtocolError
from lucevisor.protocol.frames import CHECKED_BYTES, HEADER_BYTES
from lucevisor.protocol.messages import MESSAGES, Channel, MessageKind, Role
from lucevisor.protocol.states import TRANSITIONS, LinkState, legal
from lucevisor.protocol.transport import BlockingLink, Link
from tests.fuzz.steady import amounts, mutated, run

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)


class Stream(typing.NamedTuple):
    """A legal stream of frames from one end, how many descriptors come with it, and where its receiver begins."""

    receiver: Role
    channel: Channel
    state: LinkState
    frames: list[bytes]
    n_fds: int


def made(rng, hint):
    """A value of an annotation; lists and dicts are short."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    scalars = {
        int: lambda: rng.choice((*NUMBERS, -1, -(2**63), 2**63, 2**64 - 1, rng.randrange(1000))),
        str: lambda: rng.choice(("", "a", "layers.3.k", "\0\x1b[2J", "\U0001f389", "x" * 40)),
        float: lambda: rng.choice((0.0, -0.5, 1e308, float("inf"), rng.random())),
        bool: lambda: rng.random() < 0.5,
        type(None): lambda: None,
    }
    if hint in scalars:
        return scalars[hint]()
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return record(rng, hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return rng.choice(list(hint))
    if origin is typing.Literal:
        return rng.choice(args)
    if origin is dict:
        return {made(rng, args[0]): made(rng, args[1]) for _ in range(rng.randrange(3))}
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        return origin(made(rng, args[0]) for _ in range(rng.randrange(4)))
    if origin is tuple:
        return tuple(made(rng, arg) for arg in args)
    assert origin in (typing.Union, types.UnionType), hint
    return made(rng, rng.choice(args))


def record(rng, cls, **given):
    """A message, or a record inside of one."""
    hints = typing.get_type_hints(cls)
    return cls(**{name: given[name] if name in given else made(rng, hints[name]) for name in cls.__struct_fields__})


def frame(rng, kind):
    """(bytes of a frame, how many descriptors it names)."""
    message, payload = record(rng, MESSAGES[kind].record), b""
    if kind is MessageKind.STEP_RESULT:
        shapes = [[rng.randrange(4) for _ in range(rng.randrange(3))] for _ in range(rng.randrange(3))]
        message = record(rng, MESSAGES[kind].record, segments=[(f"layer {i}", shape) for i, shape in enumerate(shapes)])
        payload = rng.randbytes(sum(4 * math.prod(shape) for shape in shapes))
    elif kind is MessageKind.STEP and rng.random() < 0.5:
        payload = rng.randbytes(rng.randrange(300))
    flags = rng.randrange(256) if kind is MessageKind.STEP else 0
    return encode(message, rng.randrange(2**64), flags, len(payload)) + payload, n_descriptors(message)


@cache
def corpus():
    """Random walks through the table of states, the same in every run; every kind comes."""
    rng = random.Random("corpus")
    found, kinds = [], set()
    while len(found) < 400 or kinds != set(MESSAGES):
        channel = rng.choice(list(Channel))
        receiver = rng.choice(list(Role)) if channel is Channel.LINK else Role.SUPERVISOR
        sender = Role.DAEMON if receiver is Role.SUPERVISOR else Role.SUPERVISOR
        start = state = rng.choice(list(LinkState)) if channel is Channel.LINK else LinkState.READY
        frames, n_fds = [], 0
        for _ in range(rng.randint(1, 6)):
            choices = list(legal(channel, sender)[state])
            if not choices:
                break
            kind = rng.choice(choices)
            data, n = frame(rng, kind)
            frames.append(data)
            kinds.add(kind)
            n_fds, state = n_fds + n, TRANSITIONS[state][kind]
        if frames:
            found.append(Stream(receiver, channel, start, frames, n_fds))
    return found


def damaged_frame(rng, data):
    """One frame, damaged in one of several ways."""
    how = rng.randrange(6)
    if how == 0:
        return data
    if how == 1:
        return mutated(rng, data)
    header, metadata = bytearray(data[:HEADER_BYTES]), data[HEADER_BYTES:]
    n_metadata = int.from_bytes(header[16:20], "little")
    metadata, payload = metadata[:n_metadata], metadata[n_metadata:]
    if how in (2, 3):  # other metadata, under right checks
        metadata = mutated(rng, metadata) if how == 2 else damaged_value(rng, metadata)
        header[16:20] = len(metadata).to_bytes(4, "little")
        header[24:28] = crc32(metadata).to_bytes(4, "little")
    elif how == 4:  # another number in the header
        start, length = rng.choice(((4, 2), (6, 1), (7, 1), (8, 8), (16, 4), (20, 4), (24, 4)))
        header[start : start + length] = (rng.choice(NUMBERS) % 256**length).to_bytes(length, "little")
    else:
        payload = mutated(rng, payload) if payload else rng.randbytes(rng.randrange(40))
    header[CHECKED_BYTES:] = crc32(header[:CHECKED_BYTES]).to_bytes(4, "little")
    return bytes(header) + metadata + payload


def damaged_value(rng, metadata):
    """The same record with one value of it another, deep or shallow."""
    try:
        value = msgspec.msgpack.decode(metadata)
    except msgspec.DecodeError:
        return metadata
    place = value
    while isinstance(place, list | dict) and place:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if not isinstance(place[key], list | dict) or not place[key] or rng.random() < 0.3:
            wrong = [
                None,
                True,
                -1,
                0,
                2**63,
                -(2**63),
                2**64 - 1,
                float("nan"),
                "",
                "x" * 300,
                b"\xff",
                [],
                {},
                [[]] * 9,
            ]
            place[key] = rng.choice([*wrong, [place[key]], rng.randrange(100)])
            break
        place = place[key]
    return msgspec.msgpack.encode(value)


def damaged_stream(rng):
    """(a stream of the corpus, its bytes after damage, numbers of descriptors that come along)."""
    stream = rng.choice(corpus())
    frames, fds = list(stream.frames), stream.n_fds
    match rng.randrange(6):
        case 0:
            rng.shuffle(frames)
        case 1:
            frames.append(rng.choice(rng.choice(corpus()).frames))
        case 2:
            frames.insert(0, rng.choice(frames))
        case 3:
            fds += rng.randrange(-2, 3)
    at = rng.randrange(len(frames))
    frames[at] = damaged_frame(rng, frames[at])
    return stream, b"".join(frames), max(0, fds)


def frame_case(rng):
    """Feed a connection in pieces; the outcome is a word."""
    stream, data, n_fds = damaged_stream(rng)
    connection = Connection(stream.receiver, stream.channel)
    connection.state = stream.state
    size = rng.choice((1 + len(data), 7, 32, 33, 500))
    frames, error = [], None
    for start in range(0, len(data), size):
        connection.receive(data[start : start + size], range(1000, 1000 + n_fds) if start == 0 else ())
        try:
            frames += connection.events()
        except RemoteProtocolError as found:
            error = found
            break
    for frame in frames:
        assert type(frame.message) is MESSAGES[frame.kind].record
    if error is None:
        return "all read" if not connection.unfinished else "waits"
    assert error.what
    assert error.where
    assert error.advice
    assert len(str(error)) < 2000
    with pytest.raises(RemoteProtocolError):
        connection.events()
    return error.where.split(",")[0].split(".")[0][:24]


N_FRAMES_A_CASE = 2.5  # of the corpus, on average


@pytest.mark.parametrize("n", amounts(3000, 400_000))
def test_connections(n):
    n_frames = sum(len(stream.frames) for stream in corpus()) / len(corpus())
    assert n_frames > N_FRAMES_A_CASE  # 400,000 cases are more than a million frames
    outcomes = run("connections", n, frame_case, growth_kib=8 << 10)
    assert {"frame header", "metadata", "descriptors", "all read", "waits"} <= outcomes.keys()


def pair():
    """A socket to write damage to, and the other end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def write_all(sock, data, n_fds):
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(n_fds)]
    try:
        sock.setblocking(False)
        sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
        return sent == len(data)  # else it is longer than a socket's buffer: the rest is cut off
    finally:
        for fd in fds:
            os.close(fd)


def n_open():
    return len(os.listdir("/proc/self/fd"))


def blocking_case(rng):
    stream, data, n_fds = damaged_stream(rng)
    ours, theirs = pair()
    link = BlockingLink(theirs, role=stream.receiver, channel=stream.channel)
    link._connection.state = stream.state
    write_all(ours, data, min(n_fds, 8))
    ours.close()
    try:
        while (frame := link.receive()) is not None:
            for fd in frame.fds:
                os.close(fd)
        return "end"
    except ProtocolError as error:
        return type(error).__name__
    finally:
        link.close()


@pytest.mark.parametrize("n", amounts(500, 20_000))
def test_blocking_links(n):
    corpus()
    before = n_open()
    outcomes = run("blocking links", n, blocking_case, growth_kib=8 << 10)
    assert outcomes.keys() == {"RemoteProtocolError", "end"}
    assert n_open() == before


async def aio_case(rng):
    stream, data, n_fds = damaged_stream(rng)
    ours, theirs = pair()
    ended = asyncio.get_running_loop().create_future()

    def on_frame(frame):
        for fd in frame.fds:
            os.close(fd)

    link = Link(theirs, on_frame, ended.set_result, role=stream.receiver, channel=stream.channel)
    link._connection.state = stream.state
    write_all(ours, data, min(n_fds, 8))
    ours.close()
    reason = await asyncio.wait_for(ended, 60)
    assert isinstance(reason, RemoteProtocolError | LinkClosed)
    link.close()
    return type(reason).__name__


@pytest.mark.parametrize("n", amounts(500, 20_000))
def test_aio_links(n):
    corpus()
    loop = asyncio.new_event_loop()
    before = n_open()
    try:
        case = lambda rng: loop.run_until_complete(aio_case(rng))  # noqa: E731
        outcomes = run("aio links", n, case, growth_kib=8 << 10)
    finally:
        loop.close()
    assert outcomes.keys() == {"RemoteProtocolError", "LinkClosed"}
    assert n_open() <= before


def test_the_corpus_begins_in_every_state():
    found = {(stream.channel, stream.state) for stream in corpus()}
    assert {state for channel, state in found if channel is Channel.LINK} >= set(LinkState) - {LinkState.CLOSING}
    assert {stream.receiver for stream in corpus()} == set(Role)
