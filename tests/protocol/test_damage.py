"""Whatever comes in: good frames before the damage, then an error; never a crash, never memory beyond the limits."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lucevisor.protocol.connection import Connection
from lucevisor.protocol.errors import RemoteProtocolError
from lucevisor.protocol.frames import HEADER_BYTES
from lucevisor.protocol.messages import Channel, Role
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


@settings(max_examples=300)
@given(data=st.binary(max_size=400), role=st.sampled_from(Role), channel=st.sampled_from(Channel))
def test_random_bytes_give_an_error_or_wait_for_a_header(data, role, channel):
    connection = Connection(role, channel)
    connection.receive(data)
    frames, error = collect(connection)
    assert frames == []
    assert error is not None or b"LVSR".startswith(data[:4])
