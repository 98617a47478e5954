"""Save and Restore on a link: one descriptor goes along, and both keep to the order of messages."""

import os
import socket

import pytest

from lucevisor.protocol.codec import encode, n_descriptors
from lucevisor.protocol.connection import Connection
from lucevisor.protocol.errors import LocalProtocolError, RemoteProtocolError
from lucevisor.protocol.messages import (
    MESSAGES,
    MessageKind,
    Restore,
    Restored,
    Role,
    Save,
    Saved,
    SlotPlace,
    SnapshotTensor,
)
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.transport import BlockingLink

PLACE = SlotPlace(130, [4, 1, 9], [2, 3], 1, 7)
TENSOR = SnapshotTensor("layers.12.k", 12, "k", "BF16", (130, 4, 256), 4096, 130 * 2048)
ORDERS = [Save(1 << 61, "a.safetensors", PLACE, [TENSOR]), Restore(1 << 61, "a.safetensors", PLACE, [TENSOR])]


def ready(role):
    connection = Connection(role)
    connection.state = LinkState.READY
    return connection


@pytest.mark.parametrize("order", ORDERS)
def test_the_descriptor_travels_with_the_frame(order, tmp_path):
    (tmp_path / "a").write_bytes(b"hello")
    ours, theirs = socket.socketpair()
    supervisor, daemon = BlockingLink(ours, role=Role.SUPERVISOR), BlockingLink(theirs, role=Role.DAEMON)
    for link in (supervisor, daemon):
        link._connection.state = LinkState.READY
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    supervisor.send(order, request_id=order.transfer, fds=[fd])
    os.close(fd)
    frame = daemon.receive()
    assert frame.message == order
    assert frame.request_id == order.transfer
    assert os.read(frame.fds[0], 9) == b"hello"
    os.close(frame.fds[0])
    answer = Saved(1 << 61, 5, 0.1) if isinstance(order, Save) else Restored(1 << 61, 5, 0.1, "F32 to BF16")
    daemon.send(answer, request_id=1 << 61)
    assert supervisor.receive().message == answer
    supervisor.close()
    daemon.close()


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_descriptor_is_rejected_on_both_ends(order):
    assert n_descriptors(order) == 1
    for n_fds in (0, 2):
        with pytest.raises(LocalProtocolError, match=f"names a snapshot file, but {n_fds} descriptors"):
            ready(Role.SUPERVISOR).send(order, n_fds=n_fds)
    daemon = ready(Role.DAEMON)
    daemon.receive(encode(order))
    with pytest.raises(RemoteProtocolError, match="names a snapshot file, 0 descriptors arrived"):
        daemon.events()


@pytest.mark.parametrize("state", [LinkState.GREETING, LinkState.IDLE, LinkState.LOADING, LinkState.CLOSING])
def test_not_before_the_model_is_loaded(state):
    for order in ORDERS:
        connection = Connection(Role.SUPERVISOR)
        connection.state = state
        with pytest.raises(LocalProtocolError, match="is not allowed in state"):
            connection.send(order, n_fds=1)


def test_a_late_answer_is_allowed_after_shutdown():
    connection = Connection(Role.SUPERVISOR)
    connection.state = LinkState.CLOSING
    connection.receive(encode(Saved(1, 2, 0.5)) + encode(Restored(3, 4, 0.5)))
    assert [f.message for f in connection.events()] == [Saved(1, 2, 0.5), Restored(3, 4, 0.5)]


def test_the_largest_save_fits_its_limit():
    tensors = [TENSOR] * (1024 * 4)
    place = SlotPlace(1 << 20, list(range(1 << 24, (1 << 24) + 16384)), list(range(16384)), 0, 1)
    for order in (Save(1 << 61, "x" * 255, place, tensors), Restore(1 << 61, "x" * 255, place, tensors)):
        kind = MessageKind.SAVE if isinstance(order, Save) else MessageKind.RESTORE
        assert len(encode(order)) < MESSAGES[kind].max_metadata_bytes
