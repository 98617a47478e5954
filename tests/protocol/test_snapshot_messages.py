"""Save and Restore on a link: one descriptor goes along, and both keep to the order of messages."""

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

PLACE = SlotPlace(130, [4, 1, 9], [2, 3], 1, 7)
TENSOR = SnapshotTensor("layers.12.k", 12, "k", "BF16", (130, 4, 256), 4096, 130 * 2048)
ORDERS = [Save(1 << 61, "a.safetensors", PLACE, [TENSOR]), Restore(1 << 61, "a.safetensors", PLACE, [TENSOR])]


def ready(role):
    connection = Connection(role)
    connection.state = LinkState.READY
    return connection


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
