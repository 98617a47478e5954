"""A transfer of several daemons ends with the last answer, whatever came first."""

import asyncio
from dataclasses import dataclass, field

from lucevisor.model.values import LayerRange
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import KIND_OF, Restored, Saved, SlotPlace, SnapshotTensor, TransferFailed
from lucevisor.snapshots.transfers import ShardTransfers

PLACE = SlotPlace(1)


@dataclass
class File:
    """Ten bytes of each layer, and five of the drafter."""

    fd: int = 0
    file: str = "made"
    draft: bool = False

    def tensors(self, layers):
        return [SnapshotTensor(f"layers.{layers.start}.k", layers.start, "k", "I8", (10,), 0, 10)]

    def draft_tensors(self):
        return [SnapshotTensor("draft.0.k", 0, "k", "I8", (5,), 0, 5, draft=True)] if self.draft else []

    def n_bytes(self, tensors):
        return sum(t.n_bytes for t in tensors)


@dataclass
class SentTo:
    """A link that is always up."""

    orders: list = field(default_factory=list)

    def send(self, message, *, request_id, fds):
        self.orders.append(message)


def shards(*groups, draft=""):
    made = ShardTransfers({group: [LayerRange(i, i + 1)] for i, group in enumerate(groups)}, draft)
    links = {group: SentTo() for group in (*groups, *([draft] if draft else []))}
    for group, link in links.items():
        made.on_ready(group, link)
    return made, links


def say(made, group, message):
    assert made.frame(group, Frame(KIND_OF[type(message)], 1, 0, message, memoryview(b"")))


async def test_the_last_answer_ends_it():
    made, links = shards("left", "right")
    end = made.save(File(), PLACE)
    assert [len(link.orders) for link in links.values()] == [1, 1]
    for _ in range(2):  # twice counts once
        say(made, "left", Saved(1, 10, 0.1))
        assert not end.done()
    say(made, "right", Saved(1, 10, 0.1))
    transfer = await end
    assert (transfer.problem, transfer.n_bytes) == ("", 20)
    say(made, "right", Saved(1, 10, 0.1))
    say(made, "right", Saved(99, 10, 0.1))


async def test_a_failure_waits_for_the_others():
    made, _ = shards("left", "right")
    end = made.save(File(), PLACE)
    say(made, "left", TransferFailed(1, "tensor layers.0.k", "disk full", ""))
    assert not end.done()
    say(made, "right", Saved(1, 10, 0.1))
    assert (await end).problem == "group left, tensor layers.0.k: disk full"


async def test_a_drafter_that_fails_does_not_fail_a_restore():
    made, _ = shards("left", draft="draft")
    end = made.restore(File(draft=True), PLACE)
    say(made, "left", Restored(1, 10, 0.1, "BF16 to float32"))
    made.on_lost("draft", "killed")
    transfer = await end
    assert (transfer.problem, transfer.without) == ("", {"draft": "group draft was lost: killed"})
    assert transfer.converted == "BF16 to float32"


async def test_a_lost_daemon_ends_its_transfers():
    made, _ = shards("left", "right")
    both, one = made.save(File(), PLACE), made.save(File(), PLACE, ["left"])
    made.on_lost("left", "killed")
    assert (await one).problem == "group left was lost: killed"
    assert not both.done()
    say(made, "right", Saved(1, 10, 0.1))
    assert (await both).problem == "group left was lost: killed"
    assert (await made.save(File(), PLACE, ["left"])).problem == "group left could not be asked: it is away"


async def test_snapshots_are_refused_while_state_is_moved():
    made, _ = shards("left")
    end = made.save(File(), PLACE)
    quiesced = asyncio.create_task(made.quiesce("its state is moved"))
    await asyncio.sleep(0)
    assert not quiesced.done()
    say(made, "left", Saved(1, 10, 0.1))
    await quiesced
    assert (await end).problem == ""
    assert "its state is moved" in (await made.save(File(), PLACE)).problem
    own = made.save(File(), PLACE, ["left"])  # what moves the state names its groups
    say(made, "left", Saved(3, 10, 0.1))
    assert (await own).problem == ""
    made.resume()
    assert not made.save(File(), PLACE).done()
