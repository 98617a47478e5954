"""Messages to bytes and back."""

import re
import struct
from pathlib import Path
from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.protocol.errors import LocalProtocolError, RemoteProtocolError
from lucevisor.protocol.frames import HEADER_BYTES, Header, decode, encode, pack_header, parse_header
from lucevisor.protocol.messages import (
    MAX_METADATA_BYTES,
    MAX_PAYLOAD_BYTES,
    MESSAGES,
    MessageKind,
    Role,
    Shutdown,
    StreamKind,
)
from lucevisor.protocol.states import TRANSITIONS, legal
from lucevisor.protocol.steps import StepResult
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


# ---- the frame header


GOLDEN = bytes.fromhex("4c565352 0100 0a 00 0807060504030201 09000000 00000000 1189306b 1d220115".replace(" ", ""))


def header(kind=MessageKind.STEP, version=1, flags=0, metadata_bytes=5, payload_bytes=0, magic=b"LVSR"):
    """A header with any fields and a right check, packed without the code under test."""
    head = struct.pack("<4sHBBQIII", magic, version, kind, flags, 7, metadata_bytes, payload_bytes, 0)
    return memoryview(head + crc32(head).to_bytes(4, "little"))


def test_all_damage_of_up_to_two_bits_is_detected():
    bits = [(i, 1 << j) for i in range(HEADER_BYTES) for j in range(8)]
    for n, (i, mask) in enumerate(bits):
        once = bytearray(GOLDEN)
        once[i] ^= mask
        with pytest.raises(RemoteProtocolError):
            parse_header(memoryview(once))
        for k, other in bits[n + 1 :: 7]:  # every seventh pair: 4,600 of them
            once[k] ^= other
            with pytest.raises(RemoteProtocolError):
                parse_header(memoryview(once))
            once[k] ^= other


@pytest.mark.parametrize("kind", list(MessageKind))
def test_lengths_over_the_limit_of_the_kind_are_refused_on_both_ends(kind):
    limits = MESSAGES[kind]
    assert limits.max_metadata_bytes <= MAX_METADATA_BYTES
    assert limits.max_payload_bytes <= MAX_PAYLOAD_BYTES
    parse_header(header(kind, metadata_bytes=limits.max_metadata_bytes, payload_bytes=limits.max_payload_bytes))
    for metadata_bytes, payload_bytes in [
        (limits.max_metadata_bytes + 1, 0),
        (0, limits.max_payload_bytes + 1),
        (2**32 - 1, 0),
    ]:
        with pytest.raises(RemoteProtocolError, match=f"{kind.name} announces"):
            parse_header(header(kind, metadata_bytes=metadata_bytes, payload_bytes=payload_bytes))
    with pytest.raises(LocalProtocolError, match="metadata of"):
        pack_header(kind, 0, 0, bytes(limits.max_metadata_bytes + 1), 0)
    with pytest.raises(LocalProtocolError, match="payload of"):
        pack_header(kind, 0, 0, b"", limits.max_payload_bytes + 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"magic": b"HTTP"}, "a frame starts with b'LVSR', found b'HTTP'"),
        ({"version": 2}, "speaks protocol 2, this side 1"),
        ({"kind": 31}, "unknown frame kind 31"),
        ({"kind": 0}, "unknown frame kind 0"),
        ({"kind": MessageKind.RESET, "flags": 4}, "RESET has undefined flags 0x4"),
    ],
)
def test_invalid_headers_are_rejected_with_the_reason(fields, text):
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        parse_header(header(**fields))
    assert caught.value.where == "frame header"
    assert caught.value.advice


# ---- order of messages


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


# ---- docs/protocol.md


TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_the_example_frame():
    block = re.search(r"```\n(4c565352.*?)```", TEXT, re.DOTALL)
    assert block is not None
    digits = "".join(re.sub(r"   .*", "", line) for line in block[1].splitlines()).replace(" ", "")
    assert bytes.fromhex(digits) == encode(Shutdown(), 0x0102030405060708)
