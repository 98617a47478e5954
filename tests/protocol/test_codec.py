"""Messages to bytes and back."""

import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.protocol.codec import decode, encode, payload_segments
from lucevisor.protocol.errors import LocalProtocolError, RemoteProtocolError
from lucevisor.protocol.frames import HEADER_BYTES, Header, pack_header, parse_header
from lucevisor.protocol.messages import MIB, Failed, MessageKind, Shutdown
from lucevisor.protocol.steps import Step, StepResult
from tests.protocol.message_strategies import message_and_payload


def split(data):
    view = memoryview(data)
    return parse_header(view[:HEADER_BYTES]), view[HEADER_BYTES:]


def header_for(kind, metadata, payload_bytes=0) -> Header:
    return parse_header(memoryview(pack_header(kind, 0, 0, metadata, payload_bytes)))


def plain(value):
    """What a reader without the types sees: maps, arrays (tagged ones start with their tag), numbers, texts."""
    if isinstance(value, msgspec.Struct):
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        config = value.__struct_config__
        tag = [] if config.tag is None else [config.tag]
        return tag + list(fields.values()) if config.array_like else fields
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("kind", list(MessageKind))
@settings(max_examples=40)
@given(data=st.data())
def test_round_trip_of_every_kind(kind, data):
    message, payload = data.draw(message_and_payload(kind))
    header, metadata = split(encode(message, 9, payload_bytes=len(payload)))
    assert (header.kind, header.request_id, header.payload_bytes) == (kind, 9, len(payload))
    assert decode(header, metadata) == message
    # The bytes are plain msgpack of the fields, readable without the declared types.
    assert msgspec.msgpack.decode(metadata) == plain(message)


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        (MessageKind.STEP, b""),
        (MessageKind.STEP, b"\xc1"),
        (MessageKind.STEP, msgspec.msgpack.encode([1])),  # region is missing
        (MessageKind.STEP, msgspec.msgpack.encode([1, "2"])),  # no coercion
        (MessageKind.STEP, msgspec.msgpack.encode([1, 2.0])),
        (MessageKind.STEP, msgspec.msgpack.encode([1, 2, [[8, 1]]])),  # no operation 8
        (MessageKind.STEP, msgspec.msgpack.encode([1, 2]) + b"\x00"),  # bytes after the end
        (MessageKind.STEP, b"\x94\x01\x02\xdd\xff\xff\xff\xff"),  # four thousand million operations, none there
        (MessageKind.RESET, b"\x81\xa5token\xdb\xff\xff\xff\xff"),
        (MessageKind.RESET, b"\x82\xa5token\x01\xa1x" + b"\x91" * 4000),  # nested deeper than the stack
        (MessageKind.FAILED, b"\x86\xa4what\xa2\xff\xfe"),  # not UTF-8
        (MessageKind.HEARTBEAT, msgspec.msgpack.encode({"count": 1, "phase": "sleep"})),
    ],
)
def test_metadata_of_wrong_types_is_rejected(kind, metadata):
    with pytest.raises(RemoteProtocolError, match=f"{kind.name} cannot be decoded") as caught:
        decode(header_for(kind, metadata), memoryview(metadata))
    assert caught.value.where == "metadata"


@pytest.mark.parametrize(
    "message",
    [
        Step(step_id=2**64, region=0),
        Step(step_id=0, region=object()),  # type: ignore[arg-type]
        Shutdown("\ud800"),
        Failed("a", "b", "c", "d", details="x" * MIB),
    ],
)
def test_unencodable_messages_are_local_errors(message):
    with pytest.raises(LocalProtocolError):
        encode(message)


@pytest.mark.parametrize(
    ("segments", "payload_bytes", "text"),
    [
        ([], 4, "the segments take 0 bytes, the payload has 4"),
        ([("logits", [2, 3])], 20, "the segments take 24 bytes, the payload has 20"),
        ([("logits", [-1, -6])], 24, "shape of 2 dimensions"),
        ([("logits", [2**62] * 9)], 0, "shape of 9 dimensions"),
        ([("logits", [2**62] * 8)], 0, "the payload has 0"),
    ],
)
def test_segments_must_describe_the_payload(segments, payload_bytes, text):
    result = StepResult(step_id=1, stage=0, segments=segments)
    metadata = msgspec.msgpack.encode(result)
    with pytest.raises(RemoteProtocolError, match=text):
        decode(header_for(MessageKind.STEP_RESULT, metadata, payload_bytes), memoryview(metadata))


def test_segments_are_views_of_the_payload():
    result = StepResult(step_id=1, stage=0, segments=[("a", [2, 2]), ("empty", [0, 5]), ("b", [])])
    payload = memoryview(array.array("f", [1, 2, 3, 4, 5])).cast("B")
    found = payload_segments(result, payload)
    assert [(name, shape, list(view)) for name, shape, view in found] == [
        ("a", (2, 2), [1, 2, 3, 4]),
        ("empty", (0, 5), []),
        ("b", (), [5]),
    ]
