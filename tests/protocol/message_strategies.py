"""Hypothesis strategies: every message from its declared types alone, and legal streams of them."""

from __future__ import annotations

import math
import types
import typing

import msgspec
from hypothesis import strategies as st

from lucevisor.protocol import messages
from lucevisor.protocol.frames import encode, n_descriptors
from lucevisor.protocol.messages import MESSAGES, MessageKind, Role, StreamKind
from lucevisor.protocol.states import TRANSITIONS, LinkState, legal
from lucevisor.protocol.steps import Step, StepResult

SCALARS = {
    int: st.integers(-(2**63), 2**64 - 1),  # what msgpack holds
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    type(None): st.none(),
}


def of_type(hint):
    """Values of an annotation; lists and dicts are short."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.deferred(lambda: record(hint))
    if origin is list:
        return st.lists(of_type(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(of_type(args[0]), of_type(args[1]), max_size=3)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(of_type(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of_type, args))
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(of_type, args))
    return st.from_type(hint)  # enums and literals


def record(cls, **given):
    """Instances of a msgspec record: each field from ``given`` or drawn from its annotation."""
    hints = typing.get_type_hints(cls)
    fields = {name: given[name] if name in given else of_type(hints[name]) for name in cls.__struct_fields__}
    return st.builds(cls, **fields)


MESSAGE = {
    kind: record(cls, segments=st.just([])) if cls is StepResult else record(cls)  # segments describe a payload
    for kind, cls in ((kind, message.record) for kind, message in MESSAGES.items())
}


@st.composite
def result_with_payload(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=3))
    n_bytes = sum(4 * math.prod(shape) for shape in shapes)
    message = draw(record(StepResult, segments=st.just([(f"layer {i}", shape) for i, shape in enumerate(shapes)])))
    return message, draw(st.binary(min_size=n_bytes, max_size=n_bytes))


def message_and_payload(kind):
    """(message, payload) of a kind; a payload only where the kind may carry one."""
    plain = st.tuples(MESSAGE[kind], st.just(b""))
    if kind in (MessageKind.ROWS, MessageKind.ROWS_COPY, MessageKind.PLACED_ROWS):
        return st.tuples(MESSAGE[kind], st.binary(min_size=1, max_size=300))
    if kind is MessageKind.STEP:
        return st.one_of(plain, st.tuples(record(Step), st.binary(max_size=300)))
    return st.one_of(plain, result_with_payload()) if kind is MessageKind.STEP_RESULT else plain


class Sent(typing.NamedTuple):
    """One frame of a generated stream."""

    kind: MessageKind
    request_id: int
    flags: int
    message: messages.Message
    payload: bytes
    fds: tuple[int, ...]
    data: bytes


class Stream(typing.NamedTuple):
    """A legal stream of frames from one end, and the state its receiver starts in."""

    receiver: Role
    channel: StreamKind
    state: LinkState
    frames: list[Sent]

    @property
    def data(self):
        return b"".join(frame.data for frame in self.frames)


@st.composite
def streams(draw, max_frames=6):
    """A random walk through the table of states by messages of one end."""
    channel = draw(st.sampled_from(list(StreamKind)))
    receiver = draw(st.sampled_from(list(Role))) if channel is StreamKind.LINK else Role.SUPERVISOR
    sender = Role.DAEMON if receiver is Role.SUPERVISOR else Role.SUPERVISOR
    start = state = draw(st.sampled_from(list(LinkState))) if channel is StreamKind.LINK else LinkState.READY
    frames = []
    fd = 1000  # numbers only: nothing opens or closes them
    for _ in range(draw(st.integers(1, max_frames))):
        kinds = list(legal(channel, sender)[state])
        if not kinds:
            break
        kind = draw(st.sampled_from(kinds))
        message, payload = draw(message_and_payload(kind))
        request_id = draw(st.integers(0, 2**64 - 1))
        n_fds = n_descriptors(message)
        flags = draw(st.integers(0, 255)) if kind is MessageKind.STEP else 0
        data = encode(message, request_id, flags, len(payload)) + payload
        frames.append(Sent(kind, request_id, flags, message, payload, tuple(range(fd, fd + n_fds)), data))
        fd += n_fds
        state = TRANSITIONS[state][kind]
    return Stream(receiver, channel, start, frames)
