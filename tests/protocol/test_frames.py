"""The frame header: its bytes, its limits, and that no damage of it passes."""

import struct
from zlib import crc32

import pytest

from lucevisor.protocol.errors import LocalProtocolError, RemoteProtocolError
from lucevisor.protocol.frames import HEADER_BYTES, pack_header, parse_header
from lucevisor.protocol.messages import MAX_METADATA_BYTES, MAX_PAYLOAD_BYTES, MESSAGES, MessageKind

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


def test_the_flags_of_a_step_name_its_stage():
    for stage in (0, 255):
        assert parse_header(memoryview(pack_header(MessageKind.STEP, stage, 0, b"", 0))).flags == stage
